"""Checks of Host and Origin against web pages that misuse a browser's access.

- A page may change something only if it is this server's: the Origin of its requests equals the Host.
- Without tokens, the Host must be a name that no attacker can own (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus

from starlette.requests import HTTPConnection
from starlette.types import Scope

from trainmedic_server.http.problems import HttpProblem

_AUTHORITY = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*)(?::[0-9]{1,5})?"
_HOST = re.compile(_AUTHORITY)
_ORIGIN = re.compile(rf"null|[A-Za-z][A-Za-z0-9+.-]*://(?P<authority>{_AUTHORITY})")
# Names that do not exist in the public DNS: a cluster's own, or the machine's.
_PRIVATE_ENDINGS = (".localhost", ".svc", ".svc.cluster.local")
_REMEMBERED = 1024  # answers for names


class OriginCheck:
    """Refuses malformed Host and Origin headers and, while `is_open`, names other than addresses, ``localhost``, names
    without a dot, cluster services, and `names` (``*.example.org`` matches all below).
    """

    def __init__(self, names: Iterable[str] = (), is_open: Callable[[], bool] = lambda: True) -> None:
        lowered = {name.lower().rstrip(".") for name in names}
        self._names = frozenset(name for name in lowered if not name.startswith("*."))
        self._endings = (*_PRIVATE_ENDINGS, *(name[1:] for name in lowered if name.startswith("*.")))
        self._is_open = is_open
        self._is_ours = lru_cache(_REMEMBERED)(self._is_address_or_name_of_ours)

    def check(self, scope: Scope) -> None:
        hosts: list[bytes] = []
        origins: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origins.append(value)
        if origins and (len(origins) > 1 or not _is_origin(origins[0])):
            raise _malformed("Origin", "is not an origin, such as https://trainmedic.example.org")
        if len(hosts) != 1:
            if hosts or scope.get("http_version") == "1.1":
                raise _malformed("Host", "must be present exactly once")
            return
        host = hosts[0].decode("latin-1")
        match = _HOST.fullmatch(host)
        if match is None:
            raise _malformed("Host", "is not a name or address with an optional port")
        if self._is_open() and not self._is_ours(match[1]):
            name = match[1]
            raise HttpProblem(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"This server has no tokens, and {name} may be a foreign name for it. Use its address, "
                f"give it tokens (--tokens), or start it with --allowed-hosts {name} (TRAINMEDIC_ALLOWED_HOSTS).",
                closes=True,
            )

    def _is_address_or_name_of_ours(self, host: str) -> bool:
        name = host.lower().rstrip(".")
        if "." not in name or name in self._names or name.endswith(self._endings):
            return True  # a name without a dot is local; an IPv6 address may have none either
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def refuse_other_sites(request: HTTPConnection) -> None:
    """Raise HttpProblem for a request from another site's page, which must not use an operator's session."""
    headers: dict[bytes, bytes] = dict(request.scope["headers"])
    if b"origin" not in headers:
        return
    origin = headers[b"origin"].decode("latin-1")
    match = _ORIGIN.fullmatch(origin)
    site = match["authority"] if match else None
    if not site or site.lower() != headers.get(b"host", b"").decode("latin-1").lower():
        raise HttpProblem(HTTPStatus.FORBIDDEN, "Pages of other sites may not do this.", closes=True)


def _is_origin(value: bytes) -> bool:
    return _ORIGIN.fullmatch(value.decode("latin-1")) is not None


def _malformed(header: str, problem: str) -> HttpProblem:
    return HttpProblem(
        HTTPStatus.BAD_REQUEST, f"{header}: {problem}.", problems=[(header.lower(), problem)], closes=True
    )
