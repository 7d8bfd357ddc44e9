"""The bounds on the memory and time that one client, or all clients together, may take of the server."""

from __future__ import annotations

from msgspec import Struct

KIB = 1024
MIB = 1024 * KIB


class ServerLimits(Struct, frozen=True):
    """Bounds on requests and on responses. Sizes are in bytes, times in seconds.

    A body is parsed into some twenty times its size, so the bodies that are parsed at one time matter
    most; together with what is held beside them a flood stays within the 512 MiB of the chart.

    ``body_bytes``: the largest webhook body. Groups of several MB occur; 8 MiB is about 8,000 alerts.
    ``small_body_bytes``: up to this size a body is small. Small bodies have memory and a turn of their
    own, so that no crowd of large ones holds them up; nearly every delivery is small.
    ``small_bytes``: small bodies held at one time, all clients together, from their first byte to the reply.
    ``large_bytes``: the same for larger ones; at least one of the largest.
    ``parsed_bytes``: small bodies that are parsed and admitted at one time; of the larger, one is.
    ``body_seconds``: the time in which a body must have arrived; Alertmanager sends it at once.
    ``heartbeat_seconds``: the quiet time after which an event stream sends a comment, below the idle
    timeout of common proxies (60 s) with room for a late one.
    ``poll_seconds``: the time between two queries of the history for new events while a client listens.
    ``stall_seconds``: the time after which a client of a stream that takes nothing is disconnected.
    ``streams``: event streams at one time; each costs a connection, not a thread or a query.
    ``viewers``: pages of the console that are told what changes; what they are told is rendered once for all.
    ``exports``: whole histories streamed at one time; each holds some runs, and takes turns on the loop.
    ``log_searches``: answers with lines of logs streamed at one time, followed ones among them; each asks agents or a
    store for pages of them.
    ``followed_logs``: pages of the console that follow a job's log. They count as
    ``log_searches``, and this lower bound leaves turns for the other searches.
    ``reads``: pages and runs read and written out at one time; more wait, up to ``waiting_reads``.
    ``page_bytes``: the size from which a page of the history ends early, as its cursor allows.
    ``check_seconds``: the time in which a dependency must answer for ``/ready``; probes wait 1 to 5 s.
    """

    body_bytes: int = 8 * MIB
    small_body_bytes: int = 256 * KIB
    small_bytes: int = 16 * MIB
    large_bytes: int = 32 * MIB
    parsed_bytes: int = 2 * MIB
    body_seconds: float = 30.0
    heartbeat_seconds: float = 15.0
    poll_seconds: float = 0.1
    stall_seconds: float = 30.0
    streams: int = 200
    viewers: int = 300
    exports: int = 10
    log_searches: int = 20
    followed_logs: int = 8
    reads: int = 3
    waiting_reads: int = 100
    page_bytes: int = 4 * MIB
    check_seconds: float = 2.0


class ConnectionLimits(Struct, frozen=True):
    """Bounds on connections, whatever is asked over them. Sizes are in bytes, times in seconds.

    ``connections``: those that are served. With ``refused`` they stay below the 1,024 open files that a
    process may have by default.
    ``refused``: those beyond, which are accepted only to be answered 503.
    ``per_client``: those of one address that have not shown a token. For one more, the one that was
    silent longest is closed.
    ``head_bytes``, ``headers``: a request's head, and how many headers it has. Browsers and proxies stay below 32 KiB.
    ``head_seconds``: the time in which a head must have arrived; Alertmanager and Prometheus send it in one packet.
    ``pipelined``: requests that wait on a connection for the one in work. Hardly any client sends
    the next request before it has the reply.
    ``keep_alive_seconds``: the time after a response in which the next request must begin: longer than
    the intervals of Alertmanager and Prometheus in a busy group.
    ``flush_seconds``: the time in which a client must take a response from the server's memory.
    ``unread_bytes``: responses that their clients have not taken yet, all together.
    ``socket_bytes``: what the system buffers for one connection, in each direction. It counts
    as the container's memory too.
    """

    connections: int = 700
    refused: int = 100
    per_client: int = 512
    head_bytes: int = 32 * KIB
    headers: int = 100
    head_seconds: float = 10.0
    pipelined: int = 8
    keep_alive_seconds: int = 75
    flush_seconds: float = 30.0
    unread_bytes: int = 32 * MIB
    socket_bytes: int = 64 * KIB
