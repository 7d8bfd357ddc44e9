"""The newest verdict on each job that failed within the last hour, for the expressions of playbooks.

Kept in memory, because planning reads nothing; the run store has them all, and a server that starts takes them from it.

Who calls it: ``job_diagnoses`` puts them in, ``topology_watch`` hands them on with what else is known of jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from trainmedic_server.domain.job_verdict import CURRENT_FOR, JobVerdict
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.verdicts import VerdictSource


class JobVerdicts:
    """Which verdicts count just now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, tuple[datetime, JobVerdict]] = {}

    def take(self, job: str, began_at: datetime, verdict: JobVerdict) -> None:
        """Take a verdict, or what it says anew."""
        newest = self._known.get(job)
        if newest is None or newest[0] <= began_at:
            self._known[job] = (began_at, verdict)

    async def load(self, source: VerdictSource) -> None:
        """Take those that an earlier server has made. Raises StoreUnavailable."""
        now = self._clock.now()
        for record in await source.verdicts(now - CURRENT_FOR, now + CURRENT_FOR):
            members = {"cause": record.cause, "confidence": record.confidence, "advice": record.advice}
            self.take(record.job, record.at, JobVerdict.of({**members, "node": record.node, "ranks": record.ranks}))

    def current(self) -> Mapping[str, JobVerdict]:
        """Return them by job."""
        oldest = self._clock.now() - CURRENT_FOR
        for job in [job for job, (began_at, _) in self._known.items() if began_at < oldest]:
            del self._known[job]
        return {job: verdict for job, (_, verdict) in self._known.items()}
