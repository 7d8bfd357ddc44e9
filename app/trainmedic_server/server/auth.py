"""Authentication: which principal sends a request, and what it may do.

Tokens come as ``Authorization: Bearer <token>``, or as the password of Basic with any user name, so
that Alertmanager's ``http_config`` works either way. They are compared by hash, in constant time,
over all tokens. Without tokens every client is ``anonymous`` and may do everything; wiring refuses to
listen like that anywhere but on loopback (`check_exposure`).
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from starlette.requests import HTTPConnection, Request

from trainmedic_server import telemetry
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.server import tokens
from trainmedic_server.server.connection_table import Standing
from trainmedic_server.server.problems import HttpProblem
from trainmedic_server.server.sites import refuse_other_sites
from trainmedic_server.server.tokens import Token, TokenRole

_REREAD_SECONDS = 5.0
_CHALLENGE = 'Bearer realm="trainmedic", Basic realm="trainmedic", charset="UTF-8"'

log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request. ``name`` is recorded as the actor of what it does."""

    name: str
    roles: frozenset[TokenRole]
    jobs: tuple[str, ...] | None = None
    """Shell patterns: only what is below ``/jobs/{job}`` of these jobs is for it. None for no such bound."""
    groups: frozenset[str] = frozenset()
    """By which playbooks say who may approve."""

    def may_ask_of(self, job: str | None) -> bool:
        """``job`` is the one in the path of a request; None where there is none in it."""
        if self.jobs is None:
            return True
        return job is not None and any(fnmatch.fnmatchcase(job, pattern) for pattern in self.jobs)

    def may(self, role: TokenRole) -> bool:
        return role in self.roles or (role is TokenRole.VIEWER and TokenRole.OPERATOR in self.roles)


ANONYMOUS = Principal("anonymous", frozenset(TokenRole))


class Authenticator:
    """Holds the tokens, and reads them again when their file has changed.

    A request makes it check `file`, at most every few seconds; if the file has become unreadable or invalid,
    the tokens stay as they were and that is logged. `monotonic` is a clock in seconds.
    """

    def __init__(
        self,
        accepted: Sequence[Token] = (),
        file: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tuple(accepted)
        self._file = file
        self._monotonic = monotonic
        self._stamp = _stamp(file)
        self._reread_at = monotonic() + _REREAD_SECONDS

    @classmethod
    def from_file(cls, file: Path) -> Authenticator:
        """Raises ConfigurationError, naming file, line and field."""
        return cls(tokens.read(file), file)

    @property
    def has_tokens(self) -> bool:
        return bool(self._tokens)

    def require(self, request: HTTPConnection, role: TokenRole) -> Principal:
        """The principal that sends the request. Raises HttpProblem, 401 or 403, where it may not act as `role`."""
        if role is not TokenRole.VIEWER:
            refuse_other_sites(request)
        principal = self._principal(request.headers.get("authorization"))
        if principal is not ANONYMOUS:
            _vouch(request, principal)
        if not principal.may(role):
            raise HttpProblem(
                HTTPStatus.FORBIDDEN, f"The token {principal.name!r} does not have the role {role}.", closes=True
            )
        if not principal.may_ask_of(request.path_params.get("job")):
            raise HttpProblem(
                HTTPStatus.FORBIDDEN,
                f"The token {principal.name!r} is for certain jobs, and this is none of them.",
                closes=True,
            )
        return principal

    def _principal(self, authorization: str | None) -> Principal:
        if self._file is not None:
            self._reread()
        if not self._tokens:
            return ANONYMOUS
        presented = _presented(authorization)
        if presented is None:
            raise _unauthenticated("A token is needed: as Bearer, or as the password of Basic.")
        digest = hashlib.sha256(presented).digest()
        match: Token | None = None
        for token in self._tokens:  # all of them, so that the time taken does not reveal which one matched
            if hmac.compare_digest(digest, token.digest):
                match = token
        if match is None:
            raise _unauthenticated("The token is not known.")
        return Principal(match.name, match.roles, match.jobs, match.groups)

    def _reread(self) -> None:
        now = self._monotonic()
        if now < self._reread_at:
            return
        self._reread_at = now + _REREAD_SECONDS
        stamp = _stamp(self._file)
        if self._file is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = tokens.read(self._file)
        except ConfigurationError as error:
            log.error("tokens file not taken; the earlier tokens stay valid", error=str(error))
        else:
            log.info("tokens file read again", tokens=len(self._tokens))


def requires(authenticator: Authenticator, role: TokenRole) -> Callable[[Request], Awaitable[Principal]]:
    """A dependency for FastAPI that lets a request through whose sender has `role`."""

    async def authenticated(request: Request) -> Principal:
        return authenticator.require(request, role)

    return authenticated


def check_exposure(host: str, has_tokens: bool, allow_anonymous: bool) -> None:
    """Raise ConfigurationError where listening on `host` would let any client on the network act."""
    if has_tokens or allow_anonymous or _is_loopback(host):
        return
    raise ConfigurationError(
        f"refusing to listen on {host or 'every address'} without tokens: anybody who reaches it could act. "
        "Give a tokens file (--tokens), listen on 127.0.0.1, or set TRAINMEDIC_ALLOW_ANONYMOUS=true"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _vouch(request: HTTPConnection, principal: Principal) -> None:
    """Tell the connection that the request came over, where there is one, whose it is."""
    vouch = request.scope.get("state", {}).get("vouch")
    if vouch is not None:
        vouch(Standing.DELIVERER if principal.may(TokenRole.WEBHOOK) else Standing.CLIENT)


def _unauthenticated(detail: str) -> HttpProblem:
    return HttpProblem(HTTPStatus.UNAUTHORIZED, detail, headers={"WWW-Authenticate": _CHALLENGE}, closes=True)


def _presented(authorization: str | None) -> bytes | None:
    """The token in the header, as bytes; None where there is none or it is malformed."""
    scheme, _, value = (authorization or "").partition(" ")
    value = value.strip()
    match scheme.lower():
        case "bearer":
            return value.encode("latin-1") or None  # headers are decoded as latin-1; this gives the bytes back
        case "basic":
            try:
                decoded = base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                return None
            return decoded.partition(b":")[2] or None
        case _:
            return None


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """A value that changes when the file does, also when a symlink on its path is swapped, as Kubernetes does."""
    if file is None:
        return None
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)
