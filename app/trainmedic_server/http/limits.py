"""Limits on the memory and time that clients may use."""

from __future__ import annotations

from msgspec import Struct

KIB = 1024
MIB = 1024 * KIB


class ServerLimits(Struct, frozen=True):
    """Limits on requests and responses. Sizes are in bytes, times in seconds.

    A body takes some twenty times its size when parsed, so bodies in parsing matter most. With all other data, a flood
    stays within the chart's 512 MiB.

    - ``body_bytes``: largest webhook body. Groups of several MB occur; 8 MiB are about 8,000 alerts.
    - ``small_body_bytes``: largest small body. Small bodies, nearly all deliveries, have a separate budget and turn, so
      that large ones never delay them.
    - ``small_bytes``: all small bodies together, from the first byte to the reply.
    - ``large_bytes``: the same for large bodies; at least one of the largest.
    - ``parsed_bytes``: small bodies in parsing and admission. Large ones are parsed one by one.
    - ``body_seconds``: time for a body to arrive. Alertmanager sends it at once.
    - ``heartbeat_seconds``: quiet time after which an event stream sends a comment; well below the idle timeout of
      common proxies (60 s).
    - ``poll_seconds``: interval of history queries while a client listens.
    - ``stall_seconds``: time after which a stream's client that reads nothing is disconnected.
    - ``streams``: concurrent event streams. Each costs a connection, not a thread or a query.
    - ``viewers``: live console pages. Updates are rendered once for all.
    - ``exports``: concurrent exports of the history. Each holds some runs and uses the event loop.
    - ``log_searches``: concurrent log answers, followed ones included. Each queries agents or a store.
    - ``followed_logs``: console pages that follow a log. They count as ``log_searches``; this limit leaves turns for
      other searches.
    - ``reads``: concurrent reads of pages and runs. Up to ``waiting_reads`` more wait.
    - ``page_bytes``: size at which a page of the history ends early, as its cursor allows.
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

    - ``connections``: served connections. With ``refused``, below the default limit of 1,024 open files.
    - ``refused``: further connections, accepted only to answer 503.
    - ``per_client``: connections of one address without a token. Another one closes the one silent longest.
    - ``head_bytes``, ``headers``: size of a request's head, and its number of headers. Browsers and proxies stay below
      32 KiB.
    - ``head_seconds``: time for a head to arrive. Alertmanager and Prometheus send it in one packet.
    - ``pipelined``: waiting requests on a connection. Hardly any client sends the next request before the reply.
    - ``keep_alive_seconds``: idle time between requests; longer than the intervals of Alertmanager and Prometheus in a
      busy group.
    - ``flush_seconds``: time for a client to take a response from the server's memory.
    - ``unread_bytes``: all responses that clients have not taken.
    - ``socket_bytes``: system buffer of one connection in each direction, which counts as the container's memory.
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
