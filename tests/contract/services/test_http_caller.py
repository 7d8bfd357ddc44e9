"""The contract of `ports.HttpCaller`, on a real server."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure, TemporaryFailure

SOON = timedelta(seconds=5)
SECRET = "s3cret-token"


@pytest.fixture
async def caller(tmp_path: Path) -> AsyncIterator[HttpxCaller]:
    (tmp_path / "token").write_text("renewed-token\n")
    secrets = {
        "TRAINMEDIC_HTTP_PAGER": SECRET,
        "TRAINMEDIC_HTTP_KEPT_FILE": str(tmp_path / "token"),
        "TRAINMEDIC_HTTP_GONE_FILE": str(tmp_path / "gone"),
        "TRAINMEDIC_HTTP_BROKEN": "two\nlines",
    }
    made = HttpxCaller(secrets)
    yield made
    await made.close()


async def test_a_call_arrives_as_it_was_given(caller, peer):
    """Method, path, query, headers and body reach the server unchanged, text beyond ASCII included."""
    reply = await caller.call("POST", peer.url("/a%2Fb?q=1"), {"X-Job": "größer"}, b"body", SOON)
    seen = peer.requests[0]
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, "fine", "text/plain")
    assert (seen.method, seen.path, seen.body) == ("POST", "/a%2Fb?q=1", b"body")
    assert seen.headers["x-job"].encode("latin-1").decode() == "größer"
    assert seen.headers["user-agent"].startswith("trainmedic/")


async def test_a_redirect_is_told_not_followed(caller, peer):
    """A reply that points elsewhere is the outcome: a call goes only where the playbook says."""
    reply = await caller.call("GET", peer.url("/redirect"), {}, None, SOON)
    assert reply.status == 302
    assert len(peer.requests) == 1


async def test_a_long_body_is_cut_at_64_kib(caller, peer):
    """No reply is larger than what is kept of it."""
    assert len((await caller.call("GET", peer.url("/big"), {}, None, SOON)).body) == 64 * 1024


async def test_a_compressed_reply_is_not_inflated(caller, peer):
    """No reply takes more memory than its bytes, whatever it claims to be compressed from."""
    tracemalloc.start()
    reply = await caller.call("GET", peer.url("/zipped"), {}, None, SOON)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (reply.status, reply.body) == (200, "")
    assert peer.requests[0].headers["accept-encoding"] == "identity"
    assert peak < 60_000_000  # the server makes the 50 MB that it compresses


@pytest.mark.parametrize(("path", "body"), [("/latin", "größer"), ("/charset", "qapla�")])
async def test_a_body_is_read_in_its_charset(caller, peer, path, body):
    """A reply's charset is honoured, and one that nobody knows does no harm."""
    assert (await caller.call("GET", peer.url(path), {}, None, SOON)).body == body


async def test_a_body_that_stalls_does_not_hide_the_status(caller, peer):
    """Once the status is known the outcome is, even if the rest of the reply never comes."""
    reply = await caller.call("GET", peer.url("/stall"), {}, None, timedelta(seconds=3))
    assert (reply.status, reply.body) == (200, "fine")


async def test_a_call_that_cannot_connect_may_be_made_again(caller, closed_port):
    """Nothing was sent, so another attempt is a new one; the URL's path, a secret perhaps, is not told."""
    with pytest.raises(TemporaryFailure) as caught:
        await caller.call("POST", f"http://127.0.0.1:{closed_port}/hook/{SECRET}", {}, None, SOON)
    assert SECRET not in str(caught.value)
    assert f"POST http://127.0.0.1:{closed_port}" in str(caught.value)


@pytest.mark.parametrize("path", ["/hang", "/close"])
async def test_a_call_without_an_answer_has_an_unknown_outcome(caller, peer, path):
    """The server read the request, so it may have acted, whether it then fell silent or hung up."""
    with pytest.raises(OutcomeUnknown) as caught:
        await caller.call("POST", peer.url(path), {}, b"x", timedelta(seconds=2))
    assert len(peer.requests) == 1
    assert path not in str(caught.value)


async def test_a_call_that_cannot_be_made_is_not_tried_again(caller):
    """A URL that no client can call fails for good."""
    with pytest.raises(PermanentFailure):
        await caller.call("GET", "gopher://somewhere/", {}, None, SOON)


async def test_a_secret_is_sent_and_never_told(caller, peer):
    """The bearer token goes out and is blotted out of a reply that repeats it."""
    reply = await caller.call("GET", peer.url("/echo"), {}, None, SOON, bearer="TRAINMEDIC_HTTP_PAGER")
    assert peer.requests[0].headers["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in reply.body
    assert reply.headers["x-seen"] == "Bearer ***"


async def test_a_secret_in_a_file_is_read_for_each_call(caller, peer, tmp_path):
    """A renewed file counts from the next call on."""
    await caller.call("GET", peer.url("/ok"), {}, None, SOON, bearer="TRAINMEDIC_HTTP_KEPT")
    (tmp_path / "token").write_text("newest-token")
    await caller.call("GET", peer.url("/ok"), {}, None, SOON, bearer="TRAINMEDIC_HTTP_KEPT")
    assert [one.headers["authorization"] for one in peer.requests] == ["Bearer renewed-token", "Bearer newest-token"]


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("TRAINMEDIC_HTTP_OTHER", PermanentFailure),
        ("TRAINMEDIC_HTTP_BROKEN", PermanentFailure),
        ("TRAINMEDIC_HTTP_GONE", TemporaryFailure),
    ],
)
async def test_a_call_without_its_secret_is_not_made(caller, peer, name, failure):
    """Where the secret is missing nothing is sent, and the failure names the secret, not its content."""
    with pytest.raises(failure, match=name) as caught:
        await caller.call("GET", peer.url("/ok"), {}, None, SOON, bearer=name)
    assert peer.requests == []
    assert "two" not in str(caught.value)


async def test_a_call_looks_for_no_module(caller, peer, monkeypatch):
    """httpcore looked six times a request for one that was not installed, each time through all of the path."""
    await caller.call("GET", peer.url("/ok"), {}, None, SOON)
    sought = Mock(return_value=None)
    monkeypatch.setattr(sys, "meta_path", [Mock(find_spec=sought), *sys.meta_path])
    await caller.call("GET", peer.url("/ok"), {}, None, SOON)
    assert sought.mock_calls == []
