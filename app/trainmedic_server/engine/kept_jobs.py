from __future__ import annotations

from collections.abc import Sequence

from trainmedic_logs.domain.known_finding import KeptJob
from trainmedic_server import errors
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import JobKept, JobReleased
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import RunStore, Transaction

MOST = 10_000  # retained jobs and attempts


class KeptJobs:
    """Jobs whose findings and verdicts are retained at any age."""

    def __init__(self, store: RunStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def keep(self, job: str, attempt: int | None, actor: str, note: str) -> KeptJob:
        """Retain a job or one attempt; it may be unknown yet. Raises Conflict if too many are retained, and
        StoreUnavailable.
        """
        kept = KeptJob(job, attempt, actor, self._clock.now(), note)

        def work(tx: Transaction) -> None:
            before = {(each.job, each.attempt) for each in tx.findings.kept_jobs()}
            if len(before) >= MOST and (job, attempt) not in before:
                raise errors.Conflict(f"{MOST} jobs are locked already; release one first")
            tx.findings.keep_job(kept)
            tx.append([recorded(JobKept(job, attempt, note), kept.at, actor=actor)])

        await self._store.transact(work)
        return kept

    async def release(self, job: str, attempt: int | None, actor: str) -> None:
        """Raises NotFound and StoreUnavailable."""

        def work(tx: Transaction) -> None:
            if not tx.findings.release_job(job, attempt):
                raise errors.NotFound("No data of that job and attempt is locked.")
            tx.append([recorded(JobReleased(job, attempt), self._clock.now(), actor=actor)])

        await self._store.transact(work)

    async def all(self) -> Sequence[KeptJob]:
        """Raises StoreUnavailable."""
        return await self._store.transact(lambda tx: tx.findings.kept_jobs())
