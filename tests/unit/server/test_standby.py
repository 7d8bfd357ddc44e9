"""What a server that stands by answers itself, and what it leaves to the one that works."""

from __future__ import annotations

import asyncio
from typing import Any, Never

import httpx
import pytest

from tests.support.api_world import World
from tests.support.clocks import StoppedClock
from trainmedic_server import telemetry
from trainmedic_server.domain.modes import Mode
from trainmedic_server.http import forwarding, problems
from trainmedic_server.http.base_path import BasePath
from trainmedic_server.http.standby import Standby


class Waiting:
    """An election that another server has won, whose address nobody knows."""

    why = "another server works"
    holder = ""


async def asked(path: str, external_url: str = "") -> tuple[httpx.Response, httpx.Response]:
    """What the server that works answers, and what one that stands by does."""
    world = World()
    standby = Standby(Waiting(), Mode.APPROVE, BasePath(external_url), StoppedClock(), telemetry.Metrics())
    transport = httpx.ASGITransport(standby)
    async with (
        world.client() as works,
        httpx.AsyncClient(transport=transport, base_url="http://two") as stands_by,
    ):
        return await works.get(path), await stands_by.get(path)


@pytest.mark.parametrize("query", ["any=true", "any=1", "any=True", "any=yes", "any=t", "any=ON", "x=1&any=%74rue"])
async def test_ready_of_any_server_is_left_to_the_one_that_works(query: str) -> None:
    """However true is written: it is handed on, which here is refused because nobody knows to whom."""
    works, stands_by = await asked(f"/ready?{query}")
    assert works.status_code == 200
    assert stands_by.headers["content-type"] == "application/problem+json"
    assert "on standby" in stands_by.json()["detail"]


@pytest.mark.parametrize("query", ["", "any=false", "any=0", "any=off", "any=true&any=no", "many=true", "x=any%3Dtrue"])
async def test_ready_is_otherwise_of_the_server_that_is_asked(query: str) -> None:
    """It says what it waits for."""
    works, stands_by = await asked(f"/ready?{query}")
    assert (works.status_code, stands_by.status_code) == (200, 503)
    assert stands_by.json()["store"]["detail"] == "on standby: another server works"
    assert (works.json()["mode"], stands_by.json()["mode"]) == ("enforce", "approve")


@pytest.mark.parametrize("query", ["any=foo", "any=", "any", "any=2", "any=truee", "any=true&any=perhaps"])
async def test_what_is_no_boolean_is_refused_as_by_the_server_that_works(query: str) -> None:
    """With the same document, whichever of them a client asks."""
    works, stands_by = await asked(f"/ready?{query}")
    assert works.status_code == stands_by.status_code == 422
    assert works.json() == stands_by.json()
    assert works.json()["errors"] == [{"field": "any", "message": "must be true or false"}]


async def test_a_client_that_stops_sending_is_not_taken_for_a_silent_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer says whose fault it is, and stays one after which Alertmanager sends again."""
    monkeypatch.setattr(forwarding, "_SLOWEST_PART_SECONDS", 0.05)
    monkeypatch.setattr(problems, "_LINGER_SECONDS", 0.05)
    sent: list[Any] = []

    async def receive() -> Never:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        has_ended.set()

    has_ended = asyncio.Event()
    leader = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with leader:
        election = Waiting()
        election.holder = "{}:{}".format(*leader.sockets[0].getsockname())
        standby = Standby(election, Mode.APPROVE, BasePath(), StoppedClock(), telemetry.Metrics())
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/webhook", "query_string": b""}
        await standby({**scope, "headers": [(b"host", b"two"), (b"content-length", b"9")]}, receive, send)
        await has_ended.wait()
    assert sent[0]["status"] == 503
    assert b"no part of the body arrived for 0.05 s" in sent[1]["body"]


async def test_a_full_standby_does_not_say_that_the_leader_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has asked the leader for this request."""
    monkeypatch.setattr(forwarding, "_TURN_SECONDS", 0.05)
    monkeypatch.setattr(forwarding, "_MOST_AT_ONCE", 0)
    election = Waiting()
    election.holder = "127.0.0.1:1"
    standby = Standby(election, Mode.APPROVE, BasePath(), StoppedClock(), telemetry.Metrics())
    transport = httpx.ASGITransport(standby)
    async with httpx.AsyncClient(transport=transport, base_url="http://two") as client:
        answer = await client.get("/now")
    assert answer.status_code == 503
    assert (
        answer.json()["detail"]
        == "This server is on standby, and too many other requests are being forwarded. Try again."
    )
