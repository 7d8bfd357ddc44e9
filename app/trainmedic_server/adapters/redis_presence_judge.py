"""Whether a presence is believed, and what it says.

Anybody who can write to Redis can write a presence. With a signing key, one is believed if it is signed by the job or
agent whose key it has, names this job or agent, and is not older than the last that was believed. Others are shown,
with the doubt, and nothing follows from what they say: what was believed last counts on, for as long as it could be
there if nobody had overwritten it. Of thousands, most say again what they have said before, with another time: every
signature is checked, and only what is new is read. Nothing here calls Redis; ``redis_presence`` reads.
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
"""How old a signed presence may be, and how far ahead of this server's clock: after a restart of this server, what
somebody has recorded can be believed once more for so long at most."""
COUNTS_FOR = timedelta(seconds=45)
"""How long a presence that was believed counts where somebody else has overwritten it. An agent, whose presence is
the rarer, writes every 10 s, and its presence lives for 30."""
_READ_MEANWHILE = timedelta(seconds=15)
"""While many presences are read, newer ones are: what is older by so much at most is no sign of anything."""
_LARGEST_CLAIMS = 2 * 1024
"""Bytes of a presence that is not believed and is shown all the same."""
_REMEMBERED = 100_000
_KINDS: Mapping[str, tuple[str, Callable[[str], str], Callable[[str], str]]] = {
    envelope.agent_presence(""): ("node", node_identity, str),
    envelope.job_presence(""): ("job", job_identity, str),
    notice.launcher_presence(""): ("job", job_identity, notice.job_of_launcher),
}
"""By the beginning of the key: the member that names the writer, the identity that signs, and the writer's name in the
rest of the key."""


class _Believed(NamedTuple):
    """The last presence under a key that was believed."""

    written_at: datetime
    ranks: frozenset[int] | None
    """Those that it listed."""
    digest: bytes
    """Of its text."""
    details: Mapping[str, Any]


class PresenceJudge:
    """Judges presences, in any thread. ``signer`` is None where no signing key is in use."""

    def __init__(self, signer: Signer | None, clock: Clock, metrics: telemetry.Metrics) -> None:
        self._signer = signer
        self._clock = clock
        self._metrics = metrics
        self._texts = PresenceTexts(_REMEMBERED)
        self._believed: OrderedDict[str, _Believed] = OrderedDict()
        self._doubted: OrderedDict[str, None] = OrderedDict()
        """The keys whose doubt is in the log."""
        self._log_limit = LogLimit()
        self._lock = threading.Lock()

    def presence_of(self, key: str, value: bytes) -> Presence:
        """The presence in the value of a key. An existing key counts as present whatever its value."""
        now = self._clock.now()
        prefix = next(prefix for prefix in _KINDS if key.startswith(prefix))
        name = key.removeprefix(prefix)
        sealed = unseal(value)
        if self._signer is None:
            details = self._texts.details(key, sealed.raw)
            return Presence(name, _time_of(details) or now, details)
        member, identity_of, writer_of = _KINDS[prefix]
        try:
            # Before anything is read of it: what is not genuine costs no more than that.
            proof = self._signer.verify_sealed(sealed, key, identity_of(writer_of(name)))
            details = self._texts.details(key, sealed.raw)
            if details.get(member) != writer_of(name):
                raise BadSignature(f"was written by another {member}: {str(details.get(member))[:100]!r}")
            written_at = self._checked_time(_time_of(details), now)
            newest = self._newest(key, _Believed(written_at, ranks_in(details), digest(sealed.raw), details))
        except BadSignature as error:
            hint = "" if sealed.signatures else "; older SDKs and agents do not sign"
            doubt = f"it {error}{hint}"
            self._note(key, doubt)
            return self._doubtful(key, name, doubt, sealed.raw, now)
        return Presence(name, newest.written_at, newest.details, uses_previous_key=proof.is_previous)

    def ranks_of(self, key: str, value: bytes | None) -> frozenset[int] | None:
        """The ranks that must answer each command; None if that is not known.

        Where the presence is not believed, or gone, they are those of the last one that was: to hide a presence must
        not hide a rank's answer.
        """
        with self._lock:
            last = self._believed.get(key)
        if value and (last is None or digest(unseal(value).raw) != last.digest):
            presence = self.presence_of(key, value)
            if presence.doubt is None:
                return ranks_in(presence.details)
        return last.ranks if last is not None else None

    def _checked_time(self, written_at: datetime | None, now: datetime) -> datetime:
        """When a signed presence was written. Raises BadSignature where that was not of late."""
        if written_at is None:
            raise BadSignature("does not say when it was written")
        if abs(now - written_at) > OLDEST:
            ahead = "ahead of" if written_at > now else "behind"
            seconds = round(abs(now - written_at).total_seconds())
            raise BadSignature(f"has a clock {seconds} s {ahead} this server's, or somebody has put an old one back")
        return written_at

    def _newest(self, key: str, genuine: _Believed) -> _Believed:
        """Believe a genuine presence, unless a later one was believed; return the later. Raises BadSignature where it
        is so much older that it was not merely read a moment ago."""
        with self._lock:
            last = self._believed.get(key)
            if last is not None and genuine.written_at < last.written_at:
                if last.written_at - genuine.written_at > _READ_MEANWHILE:
                    raise BadSignature("was put back by somebody, for there was a later one")
                return last
            self._believed[key] = genuine
            self._believed.move_to_end(key)
            if len(self._believed) > _REMEMBERED:
                self._believed.popitem(last=False)
            self._doubted.pop(key, None)
            return genuine

    def _doubtful(self, key: str, name: str, doubt: str, raw: bytes, now: datetime) -> Presence:
        claims = read(raw) if len(raw) <= _LARGEST_CLAIMS else {}
        with self._lock:
            last = self._believed.get(key)
        if last is None or abs(now - last.written_at) > COUNTS_FOR:
            return Presence(name, now, doubt=doubt, claims=claims)
        return Presence(name, last.written_at, last.details, doubt, claims)

    def _note(self, key: str, doubt: str) -> None:
        """Count a presence that is not believed, and log it once, until there is one that is."""
        self._metrics.refused_messages.labels(reason="presence").inc()
        with self._lock:
            is_new = key not in self._doubted
            self._doubted[key] = None
            if len(self._doubted) > _REMEMBERED:
                self._doubted.popitem(last=False)
        if is_new and self._log_limit.lets_through():
            log.warning("a presence is not believed", key=key[:300], why=doubt)


def ranks_in(details: Mapping[str, Any]) -> frozenset[int] | None:
    """Return the ranks that a presence says answer each command; None if it lists none."""
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
