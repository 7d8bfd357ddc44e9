"""The bounds on the memory and time that one client, or all clients together, may take of the server."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds on requests and on responses. Sizes are in bytes, times in seconds.

    ``body_bytes``: the largest webhook body. Groups of several MB occur; 8 MiB is about 8,000 alerts.
    ``held_bytes``: bodies being read, decided and committed at one time, all clients together; beyond
    it a delivery is answered 503. A body takes up to some thirty times its size once it is parsed,
    one at a time, so 64 MiB keeps a flood within the memory of a small container.
    ``body_seconds``: the time in which a body must have arrived; Alertmanager sends it at once.
    ``heartbeat_seconds``: the quiet time after which an event stream sends a comment, below the idle
    timeout of common proxies (60 s) with room for a late one.
    ``poll_seconds``: the time between two queries of the history for new events while a client listens.
    ``stall_seconds``: the time after which a client of a stream that takes nothing is disconnected.
    ``streams``: event streams at one time; each costs a connection, not a thread or a query.
    ``check_seconds``: the time in which a dependency must answer for ``/ready``; probes wait 1 to 5 s.
    """

    body_bytes: int = 8 * MIB
    held_bytes: int = 64 * MIB
    body_seconds: float = 30.0
    heartbeat_seconds: float = 15.0
    poll_seconds: float = 0.25
    stall_seconds: float = 30.0
    streams: int = 200
    check_seconds: float = 2.0
