"""Authentication: which principal sends a request, and what it may do.

Tokens come as ``Authorization: Bearer <token>``, or as the password of Basic with any user name, so
that Alertmanager's ``http_config`` works either way. They are compared by hash, in constant time,
over all tokens. A browser comes with the cookie of a session that a token began, or by a proxy that vouches for it.
Without tokens and proxies every client is ``anonymous`` and may do everything; wiring refuses to
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
from http import HTTPStatus
from pathlib import Path

from msgspec import Struct
from starlette.requests import HTTPConnection, Request

from trainmedic_server import telemetry
from trainmedic_server.auth import tokens
from trainmedic_server.auth.browser_sessions import Sessions
from trainmedic_server.auth.identity import TrustedProxies
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.http.connection_table import Standing
from trainmedic_server.http.origin_check import refuse_other_sites
from trainmedic_server.http.problems import HttpProblem
from trainmedic_server.http.read_turns import note_reader

_REREAD_SECONDS = 5.0
_VOUCHED = "trainmedic.principal"
"""The member of a request's scope by which the console, inside this process, asks in the name of whom it serves. No
client can set it: what comes over a connection is in other members."""
_CHALLENGE = 'Bearer realm="trainmedic", Basic realm="trainmedic", charset="UTF-8"'

log = telemetry.logger(__name__)


class Principal(Struct, frozen=True):
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
        proxies: TrustedProxies = TrustedProxies(()),
    ) -> None:
        self.proxies = proxies
        self.sessions: Sessions | None = None
        """Set by wiring, where browsers can sign in."""
        self._tokens = tuple(accepted)
        self._file = file
        self._monotonic = monotonic
        self._stamp = _stamp(file)
        self._reread_at = monotonic() + _REREAD_SECONDS

    @classmethod
    def from_file(cls, file: Path, proxies: TrustedProxies = TrustedProxies(())) -> Authenticator:
        """Raises ConfigurationError, naming file, line and field."""
        return cls(tokens.read(file), file, proxies=proxies)

    @property
    def has_tokens(self) -> bool:
        """Whether clients have to say who they are: by a token, or by a proxy that vouches for them."""
        return bool(self._tokens) or self.proxies.are_set

    def require(self, request: HTTPConnection, role: TokenRole, *, acts: bool | None = None) -> Principal:
        """The principal that sends the request. Raises HttpProblem, 401 or 403, where it may not act as `role`.

        `acts` says whether the request changes something, which no other site's page may; by default all do but a
        viewer's.
        """
        acts = role is not TokenRole.VIEWER if acts is None else acts
        if acts:
            refuse_other_sites(request)
        principal = request.scope.get(_VOUCHED) or self._principal(request, acts)
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
        note_reader(principal.name, acts=principal.may(TokenRole.OPERATOR))
        return principal

    def allows(self, request: HTTPConnection, role: TokenRole) -> bool:
        """Whether it still may act as `role`: for what goes on after the request was let through."""
        try:
            self.require(request, role)
        except HttpProblem:
            return False
        return True

    def token_of(self, presented: bytes) -> Token | None:
        """The token whose text is `presented`; None where there is none such."""
        if self._file is not None:
            self._reread()
        digest = hashlib.sha256(presented).digest()
        match: Token | None = None
        for token in self._tokens:  # all of them, so that the time taken does not reveal which one matched
            if hmac.compare_digest(digest, token.digest):
                match = token
        return match

    def _principal(self, request: HTTPConnection, acts: bool) -> Principal:
        if self._file is not None:
            self._reread()
        if not self.has_tokens:
            return ANONYMOUS
        presented = _presented(request.headers.get("authorization"))
        if presented is None:
            principal = self._in_session(request) or self._behind_proxy(request)
            if principal is None:
                raise _unauthenticated("A token is needed: as Bearer, or as the password of Basic.")
            if acts and "cookie" in request.headers and "origin" not in request.headers:
                raise HttpProblem(HTTPStatus.FORBIDDEN, "A browser that acts says of which page it is.", closes=True)
            return principal
        match = self.token_of(presented)
        if match is None:
            raise _unauthenticated("The token is not known.")
        return Principal(match.name, match.roles, match.jobs, match.groups)

    def _in_session(self, request: HTTPConnection) -> Principal | None:
        """Whose browser it is. Its rights are those that its token has now, but for deliveries, which no browser
        sends."""
        session = self.sessions.of(request.headers.get("cookie")) if self.sessions else None
        token = next((each for each in self._tokens if session and each.digest.hex() == session.token), None)
        if token is None or token.jobs is not None:
            return None
        return Principal(token.name, token.roles - {TokenRole.WEBHOOK}, groups=token.groups)

    def _behind_proxy(self, request: HTTPConnection) -> Principal | None:
        user = self.proxies.user_of(request)
        if user is None:
            return None
        name, roles, groups = user
        # A playbook can name an approver without saying whether that is a user or a group. The names of this file and
        # of the settings are the operator's own, so those of the proxy must not pass for them.
        if name in self._group_names() and name not in groups:
            roles -= {TokenRole.OPERATOR}
        groups -= {token.name for token in self._tokens} - {name}
        return Principal(name, roles, groups=groups)

    def _group_names(self) -> frozenset[str]:
        """Return the names of groups that are configured here."""
        return self.proxies.operator_groups.union(*(token.groups for token in self._tokens))

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


def vouched(principal: Principal) -> dict[str, Principal]:
    """The member of a scope that makes a request within this process `principal`'s."""
    return {_VOUCHED: principal}


def requires(
    authenticator: Authenticator, role: TokenRole, *, acts: bool | None = None
) -> Callable[[Request], Awaitable[Principal]]:
    """A dependency for FastAPI that lets a request through whose sender has `role`."""

    async def authenticated(request: Request) -> Principal:
        return authenticator.require(request, role, acts=acts)

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
