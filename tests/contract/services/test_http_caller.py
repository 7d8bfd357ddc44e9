"""The contract of `ports.HttpCaller`, on a real server."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.log_stores.served import certificate
from tests.support.programs import PYTHON_PATH
from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.outside import HttpAccess

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


async def test_a_call_arrives_unchanged(caller, peer):
    """Method, path, query, headers and body reach the server unchanged, including non-ASCII text."""
    reply = await caller.call("POST", peer.url("/a%2Fb?q=1"), {"X-Job": "größer"}, b"body", SOON)
    seen = peer.requests[0]
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, "fine", "text/plain")
    assert (seen.method, seen.path, seen.body) == ("POST", "/a%2Fb?q=1", b"body")
    assert seen.headers["x-job"].encode("latin-1").decode() == "größer"
    assert seen.headers["user-agent"].startswith("trainmedic/")


async def test_a_redirect_is_reported_and_not_followed(caller, peer):
    """A redirect is the outcome: a call goes only where the playbook says."""
    reply = await caller.call("GET", peer.url("/redirect"), {}, None, SOON)
    assert reply.status == 302
    assert len(peer.requests) == 1


async def test_a_long_body_is_cut_at_64_kib(caller, peer):
    """No reply is larger than the part that is kept."""
    reply = await caller.call("GET", peer.url("/big"), {}, None, SOON)
    assert (len(reply.body), reply.is_cut) == (64 * 1024, True)


async def test_a_compressed_reply_is_not_inflated(caller, peer):
    """No reply takes more memory than its bytes, whatever its claimed compression."""
    tracemalloc.start()
    reply = await caller.call("GET", peer.url("/zipped"), {}, None, SOON)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (reply.status, reply.body, reply.is_cut) == (200, "", True)
    assert peer.requests[0].headers["accept-encoding"] == "identity"
    assert peak < 60_000_000  # the server makes the 50 MB that it compresses


@pytest.mark.parametrize(("path", "body"), [("/latin", "größer"), ("/charset", "qapla�")])
async def test_a_body_is_read_in_its_charset(caller, peer, path, body):
    """A reply's charset is honoured, and an unknown one does no harm."""
    assert (await caller.call("GET", peer.url(path), {}, None, SOON)).body == body


async def test_a_body_that_stalls_does_not_hide_the_status(caller, peer):
    """Once the status is known the outcome is known, even if the rest of the reply never comes."""
    reply = await caller.call("GET", peer.url("/stall"), {}, None, timedelta(seconds=3))
    assert (reply.status, reply.body, reply.is_cut) == (200, "fine", True)


async def test_a_call_that_cannot_connect_may_be_retried(caller, closed_port):
    """Nothing was sent, so a retry is safe; the URL's path may be secret and is not reported."""
    with pytest.raises(TemporaryFailure) as caught:
        await caller.call("POST", f"http://127.0.0.1:{closed_port}/hook/{SECRET}", {}, None, SOON)
    assert SECRET not in str(caught.value)
    assert f"POST http://127.0.0.1:{closed_port}" in str(caught.value)


@pytest.mark.parametrize("path", ["/hang", "/close"])
async def test_a_call_without_an_answer_has_an_unknown_outcome(caller, peer, path):
    """The server read the request, so it may have acted before it fell silent or hung up."""
    with pytest.raises(OutcomeUnknown) as caught:
        await caller.call("POST", peer.url(path), {}, b"x", timedelta(seconds=2))
    assert len(peer.requests) == 1
    assert path not in str(caught.value)


async def test_the_cause_of_a_broken_connection_is_named(caller):
    """The library's error for a reset has no text, so the reason names its cause."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(OutcomeUnknown) as failure:
            await caller.call("GET", f"http://127.0.0.1:{port}/", {}, None, SOON)
    assert re.search(r"the connection failed: ReadError: .*\w; the call may have been carried out", str(failure.value))


async def test_an_impossible_call_is_not_retried(caller):
    """A URL that no client can call fails permanently."""
    with pytest.raises(PermanentFailure):
        await caller.call("GET", "gopher://somewhere/", {}, None, SOON)


async def test_a_secret_is_sent_and_never_revealed(caller, peer):
    """The bearer token is sent, and masked in a reply that repeats it."""
    reply = await caller.call("GET", peer.url("/echo"), {}, None, SOON, bearer="TRAINMEDIC_HTTP_PAGER")
    assert peer.requests[0].headers["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in reply.body
    assert reply.headers["x-seen"] == "Bearer ***"


@pytest.mark.parametrize("limit", range(100, 300, 3))
async def test_a_secret_cut_off_at_the_end_of_a_body_is_not_revealed_in_part(peer, limit):
    """The cut may be at any character of the secret."""
    caller = HttpxCaller({"TRAINMEDIC_HTTP_PAGER": SECRET}, body_limit=limit)
    reply = await caller.call("GET", peer.url("/echo"), {}, None, SOON, bearer="TRAINMEDIC_HTTP_PAGER")
    await caller.close()
    assert not any(SECRET[:length] in reply.body for length in range(3, len(SECRET) + 1))


async def test_a_secret_file_is_read_for_each_call(caller, peer, tmp_path):
    """A renewed file takes effect with the next call."""
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
    """If the secret is missing, nothing is sent, and the failure names the secret but not its content."""
    with pytest.raises(failure, match=name) as caught:
        await caller.call("GET", peer.url("/ok"), {}, None, SOON, bearer=name)
    assert peer.requests == []
    assert "two" not in str(caught.value)


async def test_a_call_searches_for_no_module(caller, peer, monkeypatch):
    """httpcore searched for a missing module six times per request, each time through all of the path."""
    await caller.call("GET", peer.url("/ok"), {}, None, SOON)
    sought = Mock(return_value=None)
    monkeypatch.setattr(sys, "meta_path", [Mock(find_spec=sought), *sys.meta_path])
    await caller.call("GET", peer.url("/ok"), {}, None, SOON)
    assert sought.mock_calls == []


async def test_secrets_in_headers_and_a_password_are_sent_and_never_revealed(caller, peer):
    """Each is sent in its header, and masked in a reply that repeats it, even encoded."""
    access = HttpAccess(headers={"X-Api-Key": "TRAINMEDIC_HTTP_KEPT"}, user="medic", password="TRAINMEDIC_HTTP_PAGER")
    reply = await caller.call("GET", peer.url("/echo"), {}, None, SOON, access=access)
    seen = peer.requests[0].headers
    encoded = base64.b64encode(f"medic:{SECRET}".encode()).decode()
    assert (seen["authorization"], seen["x-api-key"]) == (f"Basic {encoded}", "renewed-token")
    told = f"{reply.body} {reply.headers}"
    assert not any(part in told for part in (encoded, SECRET))


@pytest.mark.parametrize("part", ["certificate", "ca", "socket", "password"])
async def test_a_call_without_a_variable_that_it_names_is_not_made(caller, peer, part):
    """The failure names the variable."""
    access = HttpAccess(**{part: "TRAINMEDIC_HTTP_OTHER"}, user="medic")
    with pytest.raises(PermanentFailure, match="TRAINMEDIC_HTTP_OTHER"):
        await caller.call("GET", peer.url("/ok"), {}, None, SOON, access=access)
    assert peer.requests == []


async def test_a_call_goes_to_a_unix_socket(tmp_path: Path) -> None:
    """It is used instead of the URL's host, on which nothing listens."""
    lines: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readline())
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "s")
    caller = HttpxCaller({"TRAINMEDIC_HTTP_ENGINE": str(tmp_path / "s")})
    async with server:
        access = HttpAccess(socket="TRAINMEDIC_HTTP_ENGINE")
        reply = await caller.call("GET", "http://nowhere.invalid/v1/ping", {}, None, SOON, access=access)
    await caller.close()
    assert (reply.status, lines) == (204, [b"GET /v1/ping HTTP/1.1\r\n"])


async def test_a_client_certificate_and_a_custom_ca_are_used(tmp_path: Path) -> None:
    """Without either of them, nothing is sent."""
    made, key = certificate(tmp_path)
    both = tmp_path / "client.pem"
    both.write_text(made.read_text() + key.read_text())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=made)
    context.load_cert_chain(made, key)
    context.verify_mode = ssl.CERT_REQUIRED
    served: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(await reader.readline())
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    names = {"TRAINMEDIC_HTTP_CA_FILE": str(made), "TRAINMEDIC_HTTP_CERT": str(both), "TRAINMEDIC_HTTP_GONE": "/none"}
    caller = HttpxCaller(names)
    whole = HttpAccess(ca="TRAINMEDIC_HTTP_CA", certificate="TRAINMEDIC_HTTP_CERT")
    async with server:
        assert (await caller.call("GET", url, {}, None, SOON, access=whole)).status == 204
        for access in (HttpAccess(), HttpAccess(ca="TRAINMEDIC_HTTP_CA"), HttpAccess(ca="TRAINMEDIC_HTTP_GONE")):
            with pytest.raises((TemporaryFailure, OutcomeUnknown)):
                await caller.call("GET", url, {}, None, SOON, access=access)
    await caller.close()
    assert len(served) == 1


_IN_A_TERMINAL = """
import asyncio, fcntl, sys, termios
from datetime import timedelta
from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.errors import TemporaryFailure
from trainmedic_server.ports.outside import HttpAccess
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
caller = HttpxCaller({"TRAINMEDIC_HTTP_CERT": sys.argv[1]})
access = HttpAccess(certificate="TRAINMEDIC_HTTP_CERT")
try:
    asyncio.run(caller.call("GET", "https://127.0.0.1:1/", {}, None, timedelta(seconds=5), access=access))
except TemporaryFailure as error:
    print(error)
"""


def test_an_encrypted_key_is_rejected(tmp_path: Path) -> None:
    """OpenSSL would prompt in the server's terminal, and each call would block a thread until someone answers."""
    made, key = certificate(tmp_path)
    locked = subprocess.run(
        ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:s3cret"], check=True, capture_output=True
    ).stdout
    both = tmp_path / "client.pem"
    both.write_bytes(made.read_bytes() + locked)
    terminal, child = os.openpty()
    called = subprocess.run(
        [sys.executable, "-c", _IN_A_TERMINAL, str(both)],
        stdin=child,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        start_new_session=True,
        timeout=60,
        check=True,
    )
    os.close(terminal)
    os.close(child)
    assert "TRAINMEDIC_HTTP_CERT: the file cannot be used" in called.stdout
    assert "key without a password" in called.stdout
