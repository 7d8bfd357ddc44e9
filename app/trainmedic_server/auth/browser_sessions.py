"""Browser sessions, stored and in memory. Secrets are stored only as hashes. Only the leader begins and ends them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta

from trainmedic.wire.envelope import new_id
from trainmedic_server.auth.tokens import Token
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import SignedIn, SignedOut
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.sessions import Session
from trainmedic_server.ports.store import RunStore, Transaction

COOKIE = "trainmedic_session"
# Cookie over TLS. Browsers accept it from this very host only, not from others of the domain.
SECURE_COOKIE = f"__Host-{COOKIE}"
# Cookie over TLS below a base path. Browsers send it to no other program of the host.
BASE_COOKIE = f"__Secure-{COOKIE}"
LASTS = timedelta(hours=12)  # lifetime of a session
# Largest clock difference between servers. A session from further in the future has ended.
_SKEW = timedelta(minutes=5)
_SECRET_BYTES = 32
_MOST_PER_TOKEN = 20  # the oldest ends when another begins


class Sessions:
    def __init__(self, store: RunStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._by_digest: dict[str, Session] = {}

    async def load(self) -> None:
        stored = await self._store.transact(lambda unit: unit.sessions.all())
        self._by_digest = {session.digest: session for session in stored}

    def of(self, cookie_header: str | None) -> Session | None:
        """Return None if the cookie has no session, or it is over."""
        now = self._clock.now()
        found = (self._by_digest.get(_hash(secret)) for secret in _secrets_in(cookie_header or ""))
        return next((session for session in found if session is not None and _is_active(session, now)), None)

    async def begin(self, token: Token, address: str, browser: str) -> str:
        """Return the cookie's secret."""
        secret, now = secrets.token_urlsafe(_SECRET_BYTES), self._clock.now()
        digest = token.digest.hex()
        session = Session(new_id(), _hash(secret), token.name, digest, now, now + LASTS, address, browser[:200])
        earlier = [other for other in self.all() if other.name == token.name]
        surplus = [other.id for other in earlier[: max(0, len(earlier) + 1 - _MOST_PER_TOKEN)]]
        begun = recorded(SignedIn(session.id, address), now, actor=token.name)

        def keep(unit: Transaction) -> None:
            unit.sessions.end_before(now)
            unit.sessions.end(surplus)
            unit.sessions.add(session)
            unit.append([begun])

        await self._store.transact(keep)
        over = {digest for digest, other in self._by_digest.items() if other.ends_at <= now or other.id in surplus}
        self._by_digest = {digest: other for digest, other in self._by_digest.items() if digest not in over}
        self._by_digest[session.digest] = session
        return secret

    async def end(self, session: Session, actor: str) -> None:
        ended = recorded(SignedOut(session.id, session.name), self._clock.now(), actor=actor)

        def forget(unit: Transaction) -> None:
            unit.sessions.end([session.id])
            unit.append([ended])

        await self._store.transact(forget)
        self._by_digest.pop(session.digest, None)

    def all(self) -> Sequence[Session]:  # active ones, oldest first
        now = self._clock.now()
        return sorted((each for each in self._by_digest.values() if _is_active(each, now)), key=lambda each: each.id)


def _is_active(session: Session, now: datetime) -> bool:
    return session.created_at - _SKEW <= now < session.ends_at


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("latin-1", "replace")).hexdigest()


def _secrets_in(cookie_header: str) -> list[str]:
    """A cookie under a name that browsers accept only over TLS overrules the plain name."""
    pairs = [piece.strip().partition("=")[::2] for piece in cookie_header.split(";")]
    secure = [value for name, value in pairs if name in (SECURE_COOKIE, BASE_COOKIE)]
    return secure or [value for name, value in pairs if name == COOKIE]
