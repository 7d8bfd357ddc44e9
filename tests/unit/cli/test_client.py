"""The server that a command asks."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from trainmedic_core.cli import exits
from trainmedic_server.cli.client import Client


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:99999", "http://a b", "127.0.0.1:8080", "http://[::1"])
def test_a_url_that_leads_nowhere_is_a_wrong_flag(url: str) -> None:
    """And not a server that does not answer, which would be asked again."""
    with pytest.raises(exits.InvalidInput, match="is not a URL such as"):
        Client(url, None)


@pytest.mark.parametrize("token", ["secret\nline", "secr€t", "secret\0"])
def test_a_token_that_no_header_can_have_is_named_and_not_shown(token: str) -> None:
    """Otherwise the error would show it, or blame the URL."""
    with pytest.raises(exits.InvalidInput, match="TRAINMEDIC_TOKEN_FILE") as refused:
        Client("http://127.0.0.1:1", token)
    assert "secr" not in refused.value.message
    assert "URL" not in refused.value.message


@pytest.mark.parametrize("ask", [lambda client: client.get("now"), lambda client: list(client.events(None))])
def test_an_answer_that_cannot_be_decompressed_is_no_answer(ask: Callable[[Client], object]) -> None:
    """Such as one that a proxy has cut or damaged."""
    damaged = httpx.MockTransport(
        lambda _: httpx.Response(200, headers={"content-encoding": "gzip"}, content=iter([b"{}"]))
    )
    client = Client("http://127.0.0.1:8080", None)
    client._http = httpx.Client(base_url="http://127.0.0.1:8080/", transport=damaged)
    with pytest.raises(exits.Unreachable, match="cannot be decompressed"):
        ask(client)
