"""HTTP server for one page, with bounded threads, memory and open files."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

_MOST_CONNECTIONS = 16  # each with a thread
_EXCHANGE_SECONDS = 10.0  # prometheus times out after 10 s
_REQUEST_BYTES = 16 * 1024
_BACKLOG = 64  # connections waiting to be accepted

log = logging.getLogger(__name__)


# Returns headers and content, for a path and the request's headers Accept and Accept-Encoding.
Page = Callable[[str, str, str], tuple[Mapping[str, str], bytes]]


class MetricsServer(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    request_queue_size = _BACKLOG

    def __init__(self, host: str, port: int, page: Page) -> None:
        """Raises OSError if the address cannot be used."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._deadlines: dict[socket.socket, float] = {}  # deadlines of connections, in order of arrival
        self._incomplete: dict[socket.socket, None] = {}  # incomplete requests, oldest first
        self._open: set[socket.socket] = set()  # also those that `_end` has shut down, until their threads end
        self._lock = threading.Lock()
        self.page = page
        super().__init__((host, port), _MetricsRequestHandler)

    def server_bind(self) -> None:
        """Bind without the base class's DNS lookup."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return False, which closes the connection, if there are too many and none can be ended as incomplete."""
        with self._lock:
            if len(self._open) >= 2 * _MOST_CONNECTIONS:
                return False
            if len(self._deadlines) >= _MOST_CONNECTIONS:
                slowest = next(iter(self._incomplete), None)
                if slowest is None:
                    return False
                self._end(slowest)
            self._open.add(request)
            self._deadlines[request] = time.monotonic() + _EXCHANGE_SECONDS
            self._incomplete[request] = None
        return True

    def request_received(self, request: socket.socket) -> None:
        with self._lock:
            self._incomplete.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
            self._incomplete.pop(request, None)
            self._open.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections past their deadline, twice a second."""
        now = time.monotonic()
        with self._lock:
            for request in [request for request, deadline in self._deadlines.items() if deadline < now]:
                self._end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.debug("metrics client disconnected", extra={"client": client_address[0], "error": repr(error)})
        else:
            log.error("cannot serve metrics", extra={"client": client_address[0]}, exc_info=error)

    def _end(self, request: socket.socket) -> None:
        self._deadlines.pop(request, None)
        self._incomplete.pop(request, None)
        with contextlib.suppress(OSError):  # it has ended already
            request.shutdown(socket.SHUT_RDWR)


class _MetricsRequestHandler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version = "trainmedic-agent"
    sys_version = ""
    timeout = _EXCHANGE_SECONDS  # per socket call; `MetricsServer` bounds the whole exchange

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_FirstBytes(self.rfile, _REQUEST_BYTES))

    def parse_request(self) -> bool:
        is_sound = super().parse_request()
        self.close_connection = True  # one request per connection
        self.server.request_received(self.connection)
        return is_sound

    def do_GET(self) -> None:
        accept, accept_encoding = self.headers.get("Accept", ""), self.headers.get("Accept-Encoding", "")
        try:
            headers, content = self.server.page(self.path, accept, accept_encoding)
        except Exception:
            self.send_error(500)
            raise
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        return  # scrapes are not logged


class _FirstBytes(io.RawIOBase):
    def __init__(self, stream: io.BufferedIOBase, size: int) -> None:
        self._stream = stream
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._stream.read1(min(len(buffer), self._left))
        buffer[: len(piece)] = piece
        self._left -= len(piece)
        return len(piece)
