"""Trust in presences, which any client of Redis can write.

With a signing key, a presence is trusted if it is signed by the job or agent of its key, names it, is recent, and is
not much older than the last trusted one. Others are shown with the reason for distrust and have no effect. The last
trusted one stays valid for `COUNTS_FOR`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from trainmedic.wire import envelope, notice
from trainmedic.wire.log_limit import LogLimit
from trainmedic.wire.signing import BadSignature, Signer, job_identity, node_identity, unseal
from trainmedic_server import telemetry
from trainmedic_server.adapters.presence_texts import PresenceTexts, digest, read
from trainmedic_server.ports.outside import Clock, Presence

log = telemetry.logger(__name__)

OLDEST = timedelta(minutes=2)
"""Maximum age of a signed presence, and lead over this server's clock. After a restart, a copied older one can be
trusted again within this time.
"""
COUNTS_FOR = timedelta(seconds=45)
"""Validity of an overwritten trusted presence. Agents write every 10 s, with a lifetime of 30 s."""
_READING_TIME = timedelta(seconds=15)
"""Time to read many presences: one older by at most this may only have been read earlier."""
_LARGEST_CLAIMS = 2 * 1024  # Bytes of a presence whose claims are shown.
_MOST_KEYS = 100_000


class _Kind(NamedTuple):
    member: str  # Member of the content that names the writer.
    identity_of: Callable[[str], str]  # Returns the writer's identity for signatures.
    writer_of: Callable[[str], str]  # Returns the writer's name from the key's.


_KIND_BY_PREFIX: Mapping[str, _Kind] = {
    envelope.agent_presence(""): _Kind("node", node_identity, str),
    envelope.job_presence(""): _Kind("job", job_identity, str),
    notice.launcher_presence(""): _Kind("job", job_identity, notice.job_of_launcher),
}


class _Trusted(NamedTuple):
    written_at: datetime
    ranks: frozenset[int] | None
    digest: bytes
    details: Mapping[str, Any]


class PresenceJudge:
    """`signer` is None without a signing key: all presences are trusted. Thread-safe."""

    def __init__(self, signer: Signer | None, clock: Clock, metrics: telemetry.Metrics) -> None:
        self._signer = signer
        self._clock = clock
        self._metrics = metrics
        self._texts = PresenceTexts(_MOST_KEYS)
        self._trusted: OrderedDict[str, _Trusted] = OrderedDict()
        self._logged_doubts: OrderedDict[str, None] = OrderedDict()
        self._log_limit = LogLimit()
        self._lock = threading.Lock()

    def presence_of(self, key: str, value: bytes) -> Presence:
        now = self._clock.now()
        prefix = next(prefix for prefix in _KIND_BY_PREFIX if key.startswith(prefix))
        name = key.removeprefix(prefix)
        sealed = unseal(value)
        if self._signer is None:
            details = self._texts.details(key, sealed.raw)
            return Presence(name, _time_of(details) or now, details)
        kind = _KIND_BY_PREFIX[prefix]
        writer = kind.writer_of(name)
        try:
            # Verify before parsing, so that forged presences cost nothing more.
            proof = self._signer.verify_sealed(sealed, key, kind.identity_of(writer))
            details = self._texts.details(key, sealed.raw)
            if details.get(kind.member) != writer:
                raise BadSignature(f"was written by another {kind.member}: {str(details.get(kind.member))[:100]!r}")
            written_at = self._checked_time(_time_of(details), now)
            newest = self._newest(key, _Trusted(written_at, ranks_in(details), digest(sealed.raw), details))
        except BadSignature as error:
            hint = "" if sealed.signatures else "; older SDKs and agents do not sign"
            doubt = f"it {error}{hint}"
            self._count_and_log(key, doubt)
            return self._untrusted_presence(key, name, doubt, sealed.raw, now)
        return Presence(name, newest.written_at, newest.details, uses_previous_key=proof.is_previous)

    def ranks_of(self, key: str, value: bytes | None) -> frozenset[int] | None:
        """Return None if unknown. If `value` is not trusted, use the last trusted one: hiding it must not hide a rank's
        answer.
        """
        with self._lock:
            last = self._trusted.get(key)
        if value and (last is None or digest(unseal(value).raw) != last.digest):
            presence = self.presence_of(key, value)
            if presence.doubt is None:
                return ranks_in(presence.details)
        return last.ranks if last is not None else None

    def _checked_time(self, written_at: datetime | None, now: datetime) -> datetime:
        if written_at is None:
            raise BadSignature("does not say when it was written")
        if abs(now - written_at) > OLDEST:
            ahead = "ahead of" if written_at > now else "behind"
            seconds = round(abs(now - written_at).total_seconds())
            raise BadSignature(f"has a clock {seconds} s {ahead} this server's, or somebody has put an old one back")
        return written_at

    def _newest(self, key: str, current: _Trusted) -> _Trusted:
        """Return the later of this and the last trusted one. Raises BadSignature if this one is much older."""
        with self._lock:
            last = self._trusted.get(key)
            if last is not None and current.written_at < last.written_at:
                if last.written_at - current.written_at > _READING_TIME:
                    raise BadSignature("was put back by somebody, for there was a later one")
                return last
            self._trusted[key] = current
            self._trusted.move_to_end(key)
            if len(self._trusted) > _MOST_KEYS:
                self._trusted.popitem(last=False)
            self._logged_doubts.pop(key, None)
            return current

    def _untrusted_presence(self, key: str, name: str, doubt: str, raw: bytes, now: datetime) -> Presence:
        claims = read(raw) if len(raw) <= _LARGEST_CLAIMS else {}
        with self._lock:
            last = self._trusted.get(key)
        if last is None or abs(now - last.written_at) > COUNTS_FOR:
            return Presence(name, now, doubt=doubt, claims=claims)
        return Presence(name, last.written_at, last.details, doubt, claims)

    def _count_and_log(self, key: str, doubt: str) -> None:
        self._metrics.refused_messages.labels(reason="presence").inc()
        with self._lock:
            is_new = key not in self._logged_doubts
            self._logged_doubts[key] = None
            if len(self._logged_doubts) > _MOST_KEYS:
                self._logged_doubts.popitem(last=False)
        if is_new and self._log_limit.lets_through():
            log.warning("ignoring untrusted presence", key=key[:300], why=doubt)


def ranks_in(details: Mapping[str, Any]) -> frozenset[int] | None:
    ranks = details.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        return None
    if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
        return None
    return frozenset(ranks)


def _time_of(details: Mapping[str, Any]) -> datetime | None:
    try:
        return envelope.read_time(str(details.get("at")))
    except envelope.EnvelopeError:
        return None
