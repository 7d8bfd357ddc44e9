"""Ports for the programs of a test: free, and not taken by others while a program is away."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from tests.support.programs import free_port

OUTGOING = [int(end) for end in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()]


def test_no_outgoing_connection_gets_a_reserved_port() -> None:
    """A server that a test kills and restarts finds its port free."""
    ports = [free_port() for _ in range(50)]
    if OUTGOING[0] > 20_000:
        assert [port for port in ports if OUTGOING[0] <= port <= OUTGOING[1]] == []
    for port in ports:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", port))


def test_a_seed_does_not_determine_the_reserved_port() -> None:
    """Workers with the same seed would reserve the same ports."""
    drawn = []
    for _ in range(3):
        random.seed(1)
        drawn.append(tuple(free_port() for _ in range(3)))
    assert len(set(drawn)) == 3
