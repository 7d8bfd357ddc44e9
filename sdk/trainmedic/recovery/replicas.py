"""Copies of in-memory checkpoints on another node, over TCP, authenticated with a secret from the ranks' store."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import socketserver
import threading
from contextlib import AbstractContextManager, suppress
from io import BufferedIOBase
from typing import Any, Callable, Mapping

from trainmedic.errors import TrainmedicError
from trainmedic.recovery.memory_slots import SlotMark

log = logging.getLogger("trainmedic")

# Variable for this node's address, by default the one that routes to MASTER_ADDR.
ENVIRONMENT = "TRAINMEDIC_REPLICA_HOST"
TIMEOUT = 20.0  # seconds without a byte, until a connection is closed
_MOST_CONNECTIONS = 16  # at a time; further ones are closed without an answer
_LONGEST_LINE = 1 << 16  # bytes
_CHUNK = 1 << 20  # bytes
_MAC_SIZE = 32  # bytes of a SHA-256
_OTHER_MACHINE = "10.255.255.255"  # any address that is not local; nothing is sent to it

Address = tuple[str, int]  # host and port
Found = tuple[SlotMark, memoryview]
# Returns what a request asks for; within the context it does not change.
Find = Callable[[Mapping[str, Any]], AbstractContextManager[Found | None]]


class NotFetched(TrainmedicError):
    """A copy could not be fetched from another node."""


class ReplicaServer:
    """Server of copies for other nodes. Raises OSError without a port."""

    def __init__(self, secret: bytes, find: Find) -> None:
        connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)

        class RankRequest(socketserver.StreamRequestHandler):
            timeout = TIMEOUT

            def handle(self) -> None:
                if not connections.acquire(blocking=False):
                    return
                try:
                    # The client disconnected or is not a rank of this job, or the requested slot was removed.
                    with suppress(OSError, ValueError, LookupError, TypeError, TrainmedicError):
                        _answer(self.rfile, self.wfile, secret, find)
                finally:
                    connections.release()

        host = own_host()
        self._server = socketserver.ThreadingTCPServer((host, 0), RankRequest, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        try:
            self._server.server_bind()
            self._server.server_activate()
        except OSError:
            self._server.server_close()
            raise
        self.address: Address = (host, self._server.server_address[1])
        name = "trainmedic-replicas"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def fetch(
    address: Address, secret: bytes, request: Mapping[str, Any], memory_for: Callable[[SlotMark], memoryview]
) -> SlotMark | None:
    """Fetch a copy into `memory_for`'s memory. Return None if the node has none. Raises TrainmedicError and OSError."""
    asked = json.dumps({**request, "nonce": secrets.token_hex(16)}).encode() + b"\n"
    with socket.create_connection(address, TIMEOUT) as connection, connection.makefile("rb") as stream:
        connection.sendall(asked + _mac(secret, b"request", asked).hexdigest().encode() + b"\n")
        answer = stream.readline(_LONGEST_LINE)
        if not answer:  # it is too busy, or rejected the request
            raise NotFetched(f"{address[0]} closed the connection without an answer")
        expected = _mac(secret, b"answer", asked + answer)
        try:
            fields = json.loads(answer)["mark"]
            mark = None if fields is None else SlotMark.read(fields)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise NotFetched(f"{address[0]} sent a malformed answer") from error
        if mark is not None:
            _confirm(stream, expected)  # before memory of that size is allocated
            memory = memory_for(mark)
            for begin in range(0, mark.size, _CHUNK):
                part = memory[begin : min(begin + _CHUNK, mark.size)]
                _read_into(stream, part)
                expected.update(part)
        _confirm(stream, expected)
    return mark


def own_host() -> str:
    """Return this node's address for others, or loopback."""
    named, master = os.environ.get(ENVIRONMENT), os.environ.get("MASTER_ADDR", "")
    if named:
        return named
    if master in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    for target in (master, _OTHER_MACHINE):
        with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # only chooses the route, so any port will do
            host = str(probe.getsockname()[0])
            if not ipaddress.ip_address(host).is_loopback:
                return host
    return "127.0.0.1"


def _answer(source: BufferedIOBase, target: BufferedIOBase, secret: bytes, find: Find) -> None:
    asked = source.readline(_LONGEST_LINE)
    mac = source.readline(_LONGEST_LINE).strip()
    if not hmac.compare_digest(mac, _mac(secret, b"request", asked).hexdigest().encode()):
        return
    with find(json.loads(asked)) as found:
        text = json.dumps({"mark": None if found is None else json.loads(found[0].text())}).encode() + b"\n"
        target.write(text)
        proof = _mac(secret, b"answer", asked + text)
        if found is not None:
            target.write(proof.digest())
            data = found[1][: found[0].size]
            for begin in range(0, len(data), _CHUNK):
                part = data[begin : begin + _CHUNK]
                target.write(part)
                proof.update(part)
        target.write(proof.digest())


def _mac(secret: bytes, purpose: bytes, text: bytes) -> hmac.HMAC:
    return hmac.new(secret, purpose + b"\n" + text, hashlib.sha256)


def _confirm(stream: BufferedIOBase, expected: hmac.HMAC) -> None:
    if not hmac.compare_digest(stream.read(_MAC_SIZE), expected.digest()):
        raise NotFetched("data from another node is not authentic")


def _read_into(stream: BufferedIOBase, memory: memoryview) -> None:
    position = 0
    while position < len(memory):
        count = stream.readinto(memory[position:])
        if not count:
            raise NotFetched("the other node closed the connection")
        position += count


def wards_of(nodes: Mapping[int, str], rank: int) -> list[int]:
    """Return the ranks whose copies ``rank`` keeps: its share of the preceding node's."""
    by_node: dict[str, list[int]] = {}
    for other in sorted(nodes):
        by_node.setdefault(nodes[other], []).append(other)
    order = list(by_node)
    if len(order) < 2:
        return []
    own = by_node[nodes[rank]]
    before = by_node[order[order.index(nodes[rank]) - 1]]
    return [ward for number, ward in enumerate(before) if number % len(own) == own.index(rank)]
