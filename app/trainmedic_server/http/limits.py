"""Limits on the memory and time that clients may use."""

from __future__ import annotations

from msgspec import Struct

KIB = 1024
MIB = 1024 * KIB


class ServerLimits(Struct, frozen=True):
    """Limits on requests and responses. Sizes are in bytes, times in seconds.

    A body takes some twenty times its size when parsed. With all other data, a flood stays within the chart's 512 MiB.

    - ``body_bytes``: largest webhook body; 8 MiB are about 8,000 alerts.
    - ``small_body_bytes``: largest small body.
    - ``small_bytes``, ``large_bytes``: all small or large bodies, from the first byte to the reply.
    - ``parsed_bytes``: small bodies in parsing and admission. Large ones are parsed one by one.
    - ``heartbeat_seconds``: quiet time before an event stream's comment; below the idle timeout of common proxies (60
      s).
    - ``poll_seconds``: interval of history queries while a client listens.
    - ``stall_seconds``: time after which a stream's client that reads nothing is disconnected.
    - ``viewers``: live console pages.
    - ``log_searches``: concurrent log answers.
    - ``followed_logs``: console pages that follow a log; leaves turns for other searches.
    - ``reads``, ``waiting_reads``: reads of pages and runs.
    - ``page_bytes``: size at which a page of the history ends early.
    - ``check_seconds``: time for a dependency to answer for ``/ready``; probes wait 1 to 5 s.
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
    """Limits on connections. Sizes are in bytes, times in seconds.

    - ``connections``, ``refused``: served connections, and further ones that get 503; together below 1,024 open files.
    - ``per_client``: connections of one address without a token.
    - ``head_bytes``, ``headers``, ``head_seconds``: a request's head.
    - ``pipelined``: waiting requests on a connection.
    - ``keep_alive_seconds``: idle time; longer than the intervals of Alertmanager and Prometheus in a busy group.
    - ``flush_seconds``: time for a client to take a response.
    - ``unread_bytes``: all responses that clients have not taken.
    - ``socket_bytes``: system buffer per connection and direction, which counts as the container's memory.
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
