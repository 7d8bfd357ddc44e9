"""Limits on the memory and time that clients may use."""

from __future__ import annotations

from msgspec import Struct

KIB = 1024
MIB = 1024 * KIB


class ServerLimits(Struct, frozen=True):
    """Limits on requests and responses.

    A body takes some twenty times its size when parsed. With all other data, a flood stays within the chart's 512 MiB.
    """

    body_bytes: int = 8 * MIB  # largest webhook body; 8 MiB are about 8,000 alerts
    small_body_bytes: int = 256 * KIB  # largest small body
    small_bytes: int = 16 * MIB  # all small bodies, each from its first byte to the reply
    large_bytes: int = 32 * MIB  # all larger bodies, likewise
    parsed_bytes: int = 2 * MIB  # small bodies in parsing and admission; large ones are parsed one by one
    body_seconds: float = 30.0  # time for a body to arrive
    heartbeat_seconds: float = 15.0  # between comments of a quiet event stream; proxies end idle ones after 60 s
    poll_seconds: float = 0.1  # interval of history queries while a client listens
    stall_seconds: float = 30.0  # time after which a stream's client that reads nothing is disconnected
    streams: int = 200  # event streams of the API
    viewers: int = 300  # live console pages
    exports: int = 10  # of one list at once
    log_searches: int = 20  # concurrent log answers
    followed_logs: int = 8  # console pages that follow a log; leaves turns for other searches
    reads: int = 3  # concurrent reads of pages and runs
    waiting_reads: int = 100  # of operators, and as many of viewers
    page_bytes: int = 4 * MIB  # size at which a page of the history ends early
    check_seconds: float = 2.0  # time for a dependency to answer for /ready; probes wait 1 to 5 s


class ConnectionLimits(Struct, frozen=True):
    connections: int = 700
    refused: int = 100  # further connections, which get 503; with `connections` below 1,024 open files
    per_client: int = 512  # connections of one address without a token
    head_bytes: int = 32 * KIB  # a request's head, which browsers and proxies keep smaller
    headers: int = 100
    head_seconds: float = 10.0  # time for a head to arrive
    pipelined: int = 8  # waiting requests on a connection
    keep_alive_seconds: int = 75  # idle time; longer than the intervals of Alertmanager and Prometheus in a busy group
    flush_seconds: float = 30.0  # time for a client to take a response
    unread_bytes: int = 32 * MIB  # all responses that clients have not taken
    socket_bytes: int = 64 * KIB  # system buffer per connection and direction; counts as the container's memory
