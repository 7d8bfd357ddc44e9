"""The server that a command asks."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from click.testing import CliRunner

from trainmedic_core.cli import exits
from trainmedic_server.cli import runs
from trainmedic_server.cli.client import Client


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:99999", "http://a b", "127.0.0.1:8080", "http://[::1"])
def test_a_url_that_leads_nowhere_is_an_invalid_flag(url: str) -> None:
    """It does not count as a server that does not answer, which would be retried."""
    with pytest.raises(exits.InvalidInput, match="is not a URL such as"):
        Client(url, None)


@pytest.mark.parametrize("token", ["secret\nline", "secr€t", "secret\0"])
def test_a_token_invalid_in_a_header_is_named_and_not_shown(token: str) -> None:
    """Otherwise the error would show it, or blame the URL."""
    with pytest.raises(exits.InvalidInput, match="TRAINMEDIC_TOKEN_FILE") as refused:
        Client("http://127.0.0.1:1", token)
    assert "secr" not in refused.value.message
    assert "URL" not in refused.value.message


@pytest.mark.parametrize("ask", [lambda client: client.get("now"), lambda client: list(client.events(None))])
def test_an_answer_that_cannot_be_decompressed_counts_as_no_answer(ask: Callable[[Client], object]) -> None:
    """A proxy may have cut or damaged it."""
    damaged = httpx.MockTransport(
        lambda _: httpx.Response(200, headers={"content-encoding": "gzip"}, content=iter([b"{}"]))
    )
    client = Client("http://127.0.0.1:8080", None)
    client._http = httpx.Client(base_url="http://127.0.0.1:8080/", transport=damaged)
    with pytest.raises(exits.Unreachable, match="cannot be decompressed"):
        ask(client)


def test_spaces_around_a_token_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may contain them: no header may end with one, and the error would show the token."""
    client = Client("http://127.0.0.1:1", " secret \n")
    answer = httpx.MockTransport(lambda request: httpx.Response(200, json={"sent": request.headers["Authorization"]}))
    monkeypatch.setattr(client._http, "_transport", answer)
    assert client.get("now")["sent"] == "Bearer secret"
    client.close()


def answering(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes) -> Client:
    client = Client("http://me:hunter2@127.0.0.1:1", None)
    answer = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    monkeypatch.setattr(client._http, "_transport", answer)
    return client


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b"<html>", "did not answer with JSON"),
        (200, b"[]", "did not answer with an object"),
        (200, b'{"message": "ok"}', "answered without 'items'"),
        (502, b"<html>", "answered 502 Bad Gateway"),
        (502, b"[]", "answered 502 Bad Gateway"),
    ],
)
def test_another_servers_answer_is_named_with_its_address(
    status: int, body: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password in the URL is not shown."""
    client = answering(monkeypatch, status, body)
    with pytest.raises(exits.Unreachable, match=f"^http://127.0.0.1:1/approvals {said}"):
        client.get("approvals")["items"]
    client.close()


@pytest.mark.parametrize(("status", "why"), [("not_started", ": the breaker opened\n"), ("running", "\n")])
def test_an_approval_that_starts_nothing_says_why(monkeypatch: pytest.MonkeyPatch, status: str, why: str) -> None:
    """The operator who approved would take the run for started."""
    run = {"run_id": "1", "playbook": "cap", "target": "node:n1", "status": status, "message": "the breaker opened"}
    monkeypatch.setattr(Client, "post", lambda *_: run)
    printed = CliRunner().invoke(runs.runs, ["approve", "019c1415"]).output
    assert printed == f"cap node:n1: {status}{why}"
