"""Authentication of requests: by a token (Bearer, or the password of Basic), a browser session, or a trusted proxy.

Without tokens and proxies, every client is ``anonymous`` and may do everything, by default on loopback only.
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
_VOUCHED = "trainmedic.principal"  # scope member with the console's principal. Clients cannot set it.
_CHALLENGE = 'Bearer realm="trainmedic", Basic realm="trainmedic", charset="UTF-8"'

log = telemetry.logger(__name__)


class Principal(Struct, frozen=True):
    """The sender of a request. ``name`` is recorded as the actor."""

    name: str
    roles: frozenset[TokenRole]
    jobs: tuple[str, ...] | None = None
    """Shell patterns: only paths below ``/jobs/{job}`` of matching jobs are allowed. None: no such limit."""
    groups: frozenset[str] = frozenset()

    def may_ask_of(self, job: str | None) -> bool:  # None: the path is about no job
        if self.jobs is None:
            return True
        return job is not None and any(fnmatch.fnmatchcase(job, pattern) for pattern in self.jobs)

    def may(self, role: TokenRole) -> bool:
        return role in self.roles or (role is TokenRole.VIEWER and TokenRole.OPERATOR in self.roles)


ANONYMOUS = Principal("anonymous", frozenset(TokenRole))


class Authenticator:
    """Requests reread a changed tokens file, after up to 5 s. If it is invalid, the earlier tokens stay valid.
    `monotonic` is in seconds.
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
        """Set if browsers can sign in."""
        self._tokens = tuple(accepted)
        self._file = file
        self._monotonic = monotonic
        self._stamp = _stamp(file)
        self._is_rejected = False
        self._reread_at = monotonic() + _REREAD_SECONDS

    @classmethod
    def from_file(cls, file: Path, proxies: TrustedProxies = TrustedProxies(())) -> Authenticator:
        return cls(tokens.read(file), file, proxies=proxies)

    @property
    def has_tokens(self) -> bool:
        return bool(self._tokens) or self.proxies.are_set

    def has_rejected_file(self) -> bool:
        # Tokens of an earlier version are valid then.
        if self._file is not None:
            self._reread()
        return self._is_rejected

    def require(self, request: HTTPConnection, role: TokenRole, *, acts: bool | None = None) -> Principal:
        """Raise HttpProblem (401 or 403) if the principal may not act as `role`.

        `acts`: the request changes something, which pages of other sites may not do. Default: all roles except viewer.
        """
        acts = role is not TokenRole.VIEWER if acts is None else acts
        if acts:
            refuse_other_sites(request)
        principal = request.scope.get(_VOUCHED) or self._principal(request, acts)
        if principal is not ANONYMOUS:
            _raise_standing(request, principal)  # its connection is closed later than a stranger's (`connection_table`)
        if not principal.may(role):
            raise HttpProblem(
                HTTPStatus.FORBIDDEN, f"The token {principal.name!r} does not have the role {role}.", closes=True
            )
        if principal.jobs is not None and not principal.may_ask_of(request.path_params.get("job")):
            raise HttpProblem(
                HTTPStatus.FORBIDDEN,
                f"The token {principal.name!r} is limited to certain jobs, not including this one.",
                closes=True,
            )
        note_reader(principal.name, acts=principal.may(TokenRole.OPERATOR))
        return principal

    def allows(self, request: HTTPConnection, role: TokenRole) -> bool:
        """Return whether a long stream may still act as `role`."""
        try:
            self.require(request, role)
        except HttpProblem:
            return False
        return True

    def token_of(self, presented: bytes) -> Token | None:
        if self._file is not None:
            self._reread()
        digest = hashlib.sha256(presented).digest()
        match: Token | None = None
        for token in self._tokens:  # compare all: the time taken must not reveal which one matched
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
                raise _unauthenticated("A token is required, as Bearer or as the password of Basic.")
            # Browsers send cookies by themselves: only Origin shows that no other site's page caused the request.
            if acts and "cookie" in request.headers and "origin" not in request.headers:
                raise HttpProblem(HTTPStatus.FORBIDDEN, "A browser must send the header Origin for this.", closes=True)
            return principal
        match = self.token_of(presented)
        if match is None:
            raise _unauthenticated("The token is not known.")
        return Principal(match.name, match.roles, match.jobs, match.groups)

    def _in_session(self, request: HTTPConnection) -> Principal | None:
        """Return the token's present rights without deliveries, which no browser sends. None without a session, or for
        a token limited to jobs, which cannot sign in.
        """
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
        # A playbook can name an approver without stating whether that is a user or a group. Names in the tokens file
        # and in the settings are the operator's own, so a proxy's user or group must not pass for them.
        if name in self._group_names() and name not in groups:
            roles -= {TokenRole.OPERATOR}
        groups -= {token.name for token in self._tokens} - {name}
        return Principal(name, roles, groups=groups)

    def _group_names(self) -> frozenset[str]:
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
            self._is_rejected = True
            log.error("tokens file rejected; the earlier tokens stay valid", error=str(error))
        else:
            self._is_rejected = False
            log.info("tokens file reloaded", tokens=len(self._tokens))


def vouched(principal: Principal) -> dict[str, Principal]:
    """Return the scope member that makes `principal` an internal request's sender."""
    return {_VOUCHED: principal}


def requires(
    authenticator: Authenticator, role: TokenRole, *, acts: bool | None = None
) -> Callable[[Request], Awaitable[Principal]]:
    async def authenticated(request: Request) -> Principal:
        return authenticator.require(request, role, acts=acts)

    return authenticated


def check_exposure(host: str, has_tokens: bool, allow_anonymous: bool) -> None:
    """Raise ConfigurationError if any client on the network could act without a token."""
    if has_tokens or allow_anonymous or _is_loopback(host):
        return
    raise ConfigurationError(
        f"refusing to listen on {host or 'every address'} without tokens: any client could act. "
        "Give a tokens file (--tokens), listen on 127.0.0.1, or set TRAINMEDIC_ALLOW_ANONYMOUS=true"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _raise_standing(request: HTTPConnection, principal: Principal) -> None:
    vouch = request.scope.get("state", {}).get("vouch")
    if vouch is not None:
        vouch(Standing.DELIVERER if principal.may(TokenRole.WEBHOOK) else Standing.CLIENT)


def _unauthenticated(detail: str) -> HttpProblem:
    return HttpProblem(HTTPStatus.UNAUTHORIZED, detail, headers={"WWW-Authenticate": _CHALLENGE}, closes=True)


def _presented(authorization: str | None) -> bytes | None:
    scheme, _, value = (authorization or "").partition(" ")
    value = value.strip()
    match scheme.lower():
        case "bearer":
            return value.encode("latin-1") or None  # headers are decoded as latin-1; this restores the bytes
        case "basic":
            try:
                decoded = base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                return None
            return decoded.partition(b":")[2] or None
        case _:
            return None


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """Return a value that changes with the file, also when Kubernetes swaps a symbolic link on its path."""
    if file is None:
        return None
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)
