"""The agent's HTTP server: what clients can take of it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import eventually
from trainmedic_agent import metrics_server, own_log
from trainmedic_agent.metrics_server import MetricsServer


def page(path: str, accept: str, accept_encoding: str) -> tuple[dict[str, str], bytes]:
    if path == "/broken":
        raise RuntimeError("the driver is gone")
    return {"Content-Type": "text/plain"}, b"up 1\n"


@pytest.fixture
def port() -> Iterator[int]:
    server = MetricsServer("127.0.0.1", 0, page)
    thread = threading.Thread(daemon=True, target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@contextlib.contextmanager
def crowd(port: int, count: int, begin: bytes = b"GET / HTTP/1.1\r\n") -> Iterator[list[socket.socket]]:
    """Clients that send `begin` and then wait."""
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            with contextlib.suppress(OSError):
                client.sendall(begin)
            clients.append(client)
        yield clients


def scrape(port: int, path: str = "/metrics") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
        content: bytes = reply.read()
        return content


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_slow_clients_take_few_connections_and_block_no_scrape(port: int) -> None:
    """The open files and threads of the process are reserved for its work, not for unknown clients."""
    files, threads = open_files(), threading.active_count()
    with crowd(port, 150) as clients:
        for _ in range(5):
            assert scrape(port) == b"up 1\n"
        eventually(lambda: threading.active_count() - threads <= 2 * 16, 60, "threads ended", 0.05)
        assert open_files() - files - len(clients) <= 2 * 16
    eventually(lambda: threading.active_count() <= threads, 60, "every thread ended", 0.05)


def test_a_client_that_sends_slowly_is_disconnected(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit applies to the whole exchange, not to one byte."""
    monkeypatch.setattr(metrics_server, "_EXCHANGE_SECONDS", 0.5)
    with crowd(port, 1) as (client,):
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 120:
                client.sendall(b"A")
                time.sleep(0.02)
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("endless", [b"GET /" + b"a" * 200_000, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 40_000])
def test_an_endless_request_is_not_kept(port: int, endless: bytes) -> None:
    """It ends at the size limit."""
    with crowd(port, 1, endless) as (client,), contextlib.suppress(OSError):
        while client.recv(4096):
            pass
    assert scrape(port) == b"up 1\n"


def test_an_error_is_logged_as_one_line(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    """It is JSON as every other, and nothing else is printed. A client that leaves is no error."""
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    own_log.configure("info", stream)
    try:
        with pytest.raises(urllib.error.HTTPError, match="500") as refused:
            scrape(port, "/broken")
        refused.value.close()
        with socket.create_connection(("127.0.0.1", port)) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            rude.sendall(b"GET / HTTP/1.1\r\n")
        assert scrape(port) == b"up 1\n"
        (line,) = eventually(lambda: stream.getvalue().splitlines(), 60, "logged")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    written = json.loads(line)
    assert (written["event"], written["level"]) == ("cannot serve metrics", "error")
    assert "the driver is gone" in written["exception"]
    assert capfd.readouterr() == ("", "")
