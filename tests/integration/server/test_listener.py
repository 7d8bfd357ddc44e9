"""Listening: where, for how many, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from tests.support.api_world import World, payload
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.http.listener import serve


async def test_a_taken_port_is_a_configuration_error() -> None:
    """The error names the address, before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}"):
            await serve(World().app, "127.0.0.1", port, asyncio.Event())


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "a..b", "x" * 64])
async def test_an_address_of_another_host_is_a_configuration_error(host: str) -> None:
    """It is not a traceback."""
    with pytest.raises(ConfigurationError, match="cannot listen"):
        await serve(World().app, host, 0, asyncio.Event())


async def test_a_stop_lets_active_requests_finish() -> None:
    """An accepted delivery is answered before the server ends."""
    world = World()
    deciding = asyncio.Event()
    real = world.engine.admit

    async def slow(delivery: Any) -> Any:
        deciding.set()
        await asyncio.sleep(0.5)
        return await real(delivery)

    world.engine.admit = slow  # type: ignore[method-assign]
    async with httpx.AsyncClient() as client:
        async with world.served() as address:
            posting = asyncio.create_task(client.post(f"{address.url}/webhook", json=payload()))
            await deciding.wait()
        assert (await posting).status_code == 200


async def test_the_server_does_not_reveal_its_software() -> None:
    """It sends no Server header."""
    async with World().served() as address, httpx.AsyncClient() as client:
        assert "server" not in (await client.get(f"{address.url}/health")).headers
