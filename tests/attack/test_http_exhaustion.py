"""Clients that try to exhaust the server while an Alertmanager goes on delivering to it.

In each case every alert arrives, ``/health`` is answered, and memory stays below the limit of the Helm chart.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.attack.effort import trials
from tests.attack.siege import Siege, alert, bearer, besieged, webhook

SECONDS = trials(1, 60)
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    """A server with tokens, whose history holds some runs."""
    with besieged(tmp_path_factory.mktemp("guarded"), has_tokens=True) as siege:
        for _ in range(trials(2, 20)):
            runs = webhook(*(alert("Probe", number, round=str(time.monotonic_ns())) for number in range(500)))
            assert siege.ask("/webhook", "webhook", runs)[0] == 200
        yield siege


@pytest.fixture(scope="module")
def open_to_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    """A server without tokens: nobody can be told from a stranger."""
    with besieged(tmp_path_factory.mktemp("open"), has_tokens=False) as siege:
        yield siege


class Crowd:
    """Clients that each do `act` again and again over sockets of their own, for as long as the context lasts."""

    def __init__(self, siege: Siege, clients: int, act: Callable[[socket.socket], None]) -> None:
        self._port = siege.port
        self._act = act
        self._over = threading.Event()
        self._threads = [threading.Thread(daemon=True, target=self._attack) for _ in range(clients)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _attack(self) -> None:
        while not self._over.wait(0.01):
            # The server may end a connection at any point: that is its defence.
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 10) as client:
                client.settimeout(2)
                while not self._over.is_set():
                    self._act(client)


@contextlib.contextmanager
def held(siege: Siege, count: int, begin: bytes) -> Iterator[list[socket.socket]]:
    """Connections that have sent `begin` and read nothing."""
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", siege.port), 10))
                client.sendall(begin)
                clients.append(client)
        yield clients


def request(path: str, role: str | None = None, method: str = "GET", more: str = "") -> bytes:
    token = "".join(f"{name}: {value}\r\n" for name, value in bearer(role).items())
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{token}{more}\r\n".encode()


def test_the_server_survives_pipelined_unread_requests(guarded: Siege) -> None:
    """Neither the waiting requests nor the responses fill the memory."""
    many = [request(path) * 1000 for path in ("/health", "/openapi.json", "/history", "/metrics")]
    turn = iter(range(10_000_000))
    with guarded, Crowd(guarded, 8, lambda client: client.sendall(many[next(turn) % len(many)])):
        time.sleep(SECONDS)


def test_held_connections_do_not_keep_new_clients_out(guarded: Siege) -> None:
    """They are idle, have sent half a head, or do not read their response."""
    half = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nA: "
    with (
        guarded,
        held(guarded, 300, b""),
        held(guarded, 300, b"\r\n"),
        held(guarded, 300, request("/openapi.json")),
        held(guarded, 300, half) as clients,
    ):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for client in clients:
                with contextlib.suppress(OSError):
                    client.sendall(b"a")
            time.sleep(0.1)


def test_the_server_survives_large_bodies_at_once(guarded: Siege) -> None:
    """There are 16 bodies of the largest size, among them the most memory-hungry JSON, with and without a token."""
    filler = "x" * 1000
    bodies = [
        webhook(*(alert("Unmatched", number, filler=filler) for number in range(6000))),
        b'{"version":"4","alerts":[' + b'{"a":"' * 1_000_000 + b"]}",
        b'["\\ud800",' + b'"a","b",' * 1_000_000 + b"1]",
        b'{"version":"4","x":[' + b'{"a":{}}, ' * 800_000 + b"1]}",
        b'{"version":"4","x":[' + b'{"abcdefghijklmnopqrstuvwx":0}, ' * 240_000 + b'1],"alerts":[]}',
    ]
    heads = [
        request("/webhook", role, "POST", f"Content-Length: {len(body)}\r\n")
        for body in bodies
        for role in ("webhook", None)
    ]
    turn = iter(range(10_000_000))

    def post(client: socket.socket) -> None:
        number = next(turn)
        client.settimeout(60)
        client.sendall(heads[number % len(heads)])
        client.sendall(bodies[number % len(heads) // 2])
        # Nothing where the client was still sending when the connection ended.
        assert client.recv(65536)[9:12] in (b"", b"200", b"400", b"401", b"413", b"422", b"503")
        raise ConnectionResetError  # the next body goes over a connection of its own

    with guarded, Crowd(guarded, 16, post):
        time.sleep(SECONDS * 3)


def test_the_server_survives_event_replays_and_history_exports(guarded: Siege) -> None:
    """Sixty replays from the beginning, and as many exports and pages, by reading and non-reading clients."""
    asked = [
        request("/events?after=0", "viewer"),
        request("/history", "viewer", more="Accept: application/x-ndjson\r\n"),
        request("/history", "viewer", more="Accept: text/csv\r\n"),
        request("/history?limit=1000", "viewer"),
    ]
    turn = iter(range(10_000_000))

    def read(client: socket.socket) -> None:
        number = next(turn)
        client.sendall(asked[number % len(asked)])
        end = time.monotonic() + number % 3  # some do not read at all
        while time.monotonic() < end:
            if not client.recv(65536):
                return

    with guarded, held(guarded, 60, asked[0]), Crowd(guarded, 24, read):
        time.sleep(SECONDS)


def test_without_tokens_slow_bodies_and_idle_connections_block_no_client(open_to_all: Siege) -> None:
    """The longest-silent connection closes first, and a slowly arriving body delays no delivery."""
    slow = request("/webhook", None, "POST", f"Content-Length: {8 * MIB}\r\n") + b" " * 200_000
    large = request("/webhook", None, "POST", f"Content-Length: {8 * MIB}\r\n") + b" " * (8 * MIB - 1)
    with open_to_all, held(open_to_all, 300, b""), held(open_to_all, 200, slow):
        time.sleep(SECONDS)
    with open_to_all, held(open_to_all, 8, large), held(open_to_all, 900, b""):
        time.sleep(SECONDS)
