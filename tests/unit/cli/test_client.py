"""The server that a command asks."""

from __future__ import annotations

import click
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


def test_an_answer_that_cannot_be_unpacked_is_a_failure_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a proxy's, whose header states another form than its body has."""
    client = Client("http://127.0.0.1:1", None)
    answer = httpx.MockTransport(lambda _: httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=b"abc"))
    monkeypatch.setattr(client._http, "_transport", answer)
    with pytest.raises(exits.Unreachable, match="cannot be unpacked"):
        client.get("now")
    client.close()


@pytest.mark.parametrize("status", [200, 401, 500])
def test_an_error_shows_the_asked_url_without_its_password(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a proxy."""
    client = Client("http://ann:geheim@127.0.0.1:1/at", None)
    answer = httpx.MockTransport(lambda _: httpx.Response(status, text="<html>"))
    monkeypatch.setattr(client._http, "_transport", answer)
    with pytest.raises(click.ClickException) as refused:
        client.get("jobs/a@b", {"limit": 1})
    assert refused.value.message.startswith("http://127.0.0.1:1/at/jobs/a@b?limit=1 ")
    client.close()
