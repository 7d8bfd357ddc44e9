"""Copies of checkpoints over TCP: what arrives is what a rank of the job has sent, or nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from trainmedic.recovery import replicas
from trainmedic.recovery.memory_slots import SlotMark
from trainmedic.recovery.replicas import Address, NotFetched, ReplicaServer, fetch, wards_of

SECRET = b"s" * 32
CONTENT = bytes(range(256)) * 20_000
MARK = SlotMark("set-5", 5, "2026-01-01T00:00:00Z", 0, 2, len(CONTENT), 100, 7)


@contextmanager
def find(request: Mapping[str, Any]) -> Iterator[replicas.Found | None]:
    yield (MARK, memoryview(CONTENT)) if request["rank"] == 0 else None


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(replicas, "TIMEOUT", 2.0)


@pytest.fixture
def server() -> Iterator[ReplicaServer]:
    serving = ReplicaServer(SECRET, find)
    yield serving
    serving.close()


def fetched(address: Address, rank: int = 0, secret: bytes = SECRET) -> tuple[SlotMark | None, bytes]:
    memory = bytearray(len(CONTENT) + 10)
    mark = fetch(address, secret, {"rank": rank}, lambda _: memoryview(memory))
    return mark, bytes(memory)


@contextmanager
def between(address: Address, change: Callable[[bytes], bytes]) -> Iterator[Address]:
    """Somebody in the middle, who may change what the server sends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def relay() -> None:
            client, _ = listening.accept()
            with suppress(OSError), client, socket.create_connection(address) as upstream:
                upstream.sendall(client.recv(1 << 16))
                while data := upstream.recv(1 << 20):
                    client.sendall(change(data))

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        yield listening.getsockname()[:2]


def test_a_rank_of_the_job_gets_all_data(server: ReplicaServer) -> None:
    assert fetched(server.address)[0] == MARK
    assert fetched(server.address)[1][: len(CONTENT)] == CONTENT
    assert fetched(server.address, rank=1)[0] is None


def test_a_client_without_the_secret_gets_nothing(server: ReplicaServer) -> None:
    with pytest.raises(NotFetched, match="closed the connection without an answer"):
        fetched(server.address, secret=b"t" * 32)


@pytest.mark.parametrize("place", [3, 70, 5000])
def test_data_changed_in_transit_is_rejected(server: ReplicaServer, place: int) -> None:
    """The mark or the content is changed; for a changed mark not even memory is allocated."""
    sent = 0

    def change(data: bytes) -> bytes:
        nonlocal sent
        begin, sent = sent, sent + len(data)
        if not begin <= place < sent:
            return data
        changed = bytearray(data)
        changed[place - begin] ^= 1
        return bytes(changed)

    with between(server.address, change) as address, pytest.raises(NotFetched):
        fetched(address)


def test_a_server_that_disconnects_or_is_silent_is_abandoned(server: ReplicaServer) -> None:
    with between(server.address, lambda data: data[:1000]) as address, pytest.raises((NotFetched, OSError)):
        fetched(address)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        fetched(silent.getsockname()[:2])


def test_unauthenticated_clients_do_not_block_the_service(server: ReplicaServer) -> None:
    """They send nonsense, endless lines or nothing."""
    with socket.create_connection(server.address) as idle:
        for nonsense in (b"", b"\n\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 200_000, b'{"rank": 0}\n' + b"0" * 64 + b"\n"):
            with socket.create_connection(server.address) as stranger:
                answer = b""
                with suppress(OSError):  # it was closed before all of the nonsense was sent
                    stranger.sendall(nonsense)
                    stranger.shutdown(socket.SHUT_WR)
                    answer = stranger.recv(10)
                assert answer == b""
        assert fetched(server.address)[0] == MARK
        idle.sendall(b"x")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["a", "a"], [[], []]),
        (["a", "b"], [[1], [0]]),
        (["a", "a", "b", "b"], [[2], [3], [0], [1]]),
        (["a", "b", "c"], [[2], [0], [1]]),
        (["a", "a", "a", "b"], [[3], [], [], [0, 1, 2]]),
    ],
)
def test_each_rank_is_replicated_by_a_rank_of_another_node(nodes: list[str], expected: list[list[int]]) -> None:
    by_rank = dict(enumerate(nodes))
    assert [wards_of(by_rank, rank) for rank in by_rank] == expected
