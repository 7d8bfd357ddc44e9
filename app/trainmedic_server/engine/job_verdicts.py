"""Newest verdicts of the last hour by job. In memory, because planning reads no store."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from trainmedic_server.domain.job_verdict import CURRENT_FOR, JobVerdict, VerdictsOnJob
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.verdicts import VerdictSource

_Newest = Mapping[str, tuple[datetime, JobVerdict]]  # by job, with `KnownVerdict.began_at`


class JobVerdicts:
    """One thread writes; any may read, because values are replaced, never changed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: _Newest = {}
        self._slownesses: _Newest = {}

    def take(self, job: str, began_at: datetime, verdict: JobVerdict, *, is_slow: bool = False) -> None:
        """`is_slow`: of a slow job."""
        known = self._slownesses if is_slow else self._failures
        newest = known.get(job)
        if newest is not None and newest[0] > began_at:
            return
        recent = {**self._recent(known), job: (began_at, verdict)}
        if is_slow:
            self._slownesses = recent
        else:
            self._failures = recent

    async def load(self, source: VerdictSource) -> None:
        """Raises StoreUnavailable."""
        now = self._clock.now()
        for record in await source.verdicts(now - CURRENT_FOR, now + CURRENT_FOR):
            members = {"cause": record.cause, "confidence": record.confidence, "advice": record.advice}
            verdict = JobVerdict.of({**members, "node": record.node, "ranks": record.ranks})
            self.take(record.job, record.at, verdict, is_slow=record.is_slow)

    def current(self) -> Mapping[str, VerdictsOnJob]:
        failures, slownesses = self._failures, self._slownesses
        if not failures and not slownesses:
            return {}
        failures, slownesses = self._recent(failures), self._recent(slownesses)
        return {job: VerdictsOnJob(_of(failures, job), _of(slownesses, job)) for job in {*failures, *slownesses}}

    def _recent(self, known: _Newest) -> _Newest:
        oldest = self._clock.now() - CURRENT_FOR
        return {job: newest for job, newest in known.items() if newest[0] >= oldest}


def _of(known: _Newest, job: str) -> JobVerdict | None:
    return known[job][1] if job in known else None
