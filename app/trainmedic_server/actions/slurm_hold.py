"""Actions ``slurm.hold`` and ``slurm.release``. A mark in the job's admin comment names each run that holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field

from trainmedic_server.actions.base import Irreversible
from trainmedic_server.actions.slurm import UNCHANGED, JobAction, SlurmJobParams, changed_job, job_state
from trainmedic_server.actions.slurm_marks import PREFIX
from trainmedic_server.actions.slurm_watched import SlurmEffect, WatchedAction
from trainmedic_server.domain.topology import SLURM, SlurmTopology
from trainmedic_server.errors import ObjectMissing, TemporaryFailure
from trainmedic_server.ports.actions import ON_RECORD, Action, Call, Inverse, LeasedEffect
from trainmedic_server.ports.slurm import SlurmJob

_HOLD_MARKS = re.compile(rf"\[{PREFIX}hold [^\]]*\]")
_BY_ANOTHER = "held by another already: the undo leaves it held"


def _hold_mark(run_id: str) -> str:
    return f"[{PREFIX}hold {run_id}]"


class SlurmReleaseParams(SlurmJobParams):
    restore: Literal[True] | None = Field(None, description="As an undo: end this run's own hold.")


class SlurmHold(WatchedAction, JobAction):
    name: ClassVar[str] = "slurm.hold"
    summary: ClassVar[str] = (
        "Keep a Slurm job from starting. A running job continues, and waits after a requeue. Undo releases it, unless "
        "another has held it."
    )
    Params: ClassVar[type[BaseModel]] = SlurmJobParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        job_id = await self.job_id(call)

        async def attempt() -> Mapping[str, Any]:
            job = await self.unended_job(job_id)
            if job.is_held and not _HOLD_MARKS.search(job.admin_comment):
                return {**job_state(job, _BY_ANOTHER), **UNCHANGED}
            return await self._hold(job_id, job, call.run_id)

        return await self.retry_until_deadline(call, attempt)

    async def _hold(self, job_id: str, job: SlurmJob, run_id: str) -> Mapping[str, Any]:
        mark = _hold_mark(run_id)
        if mark not in job.admin_comment:
            await self.slurm.set_admin_comment(job_id, f"{job.admin_comment}{mark}")  # before the act
        if not job.is_held:
            for part in job.parts:
                await self.slurm.hold(part)
        after = await self.read_back(self.slurm.job(job_id))
        if not after.is_held:
            raise TemporaryFailure(f"Slurm does not hold job {job_id}", job_state(after))
        return job_state(after)

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        job_id = changed_job(cast(SlurmJobParams, params), output)
        return Inverse(SlurmReleaseJob.name, {"restore": True, **({"job_id": job_id} if job_id else {})})

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        return timedelta(0) if output.get("note") == _BY_ANOTHER else super().granted(output)

    async def look(self, effect: LeasedEffect) -> SlurmEffect | None:
        job_id = _job_of(effect)
        if job_id is None:
            return None
        try:
            job = await self.slurm.job(job_id)
        except ObjectMissing:
            return None
        if job.has_ended:
            return None
        is_marked = _hold_mark(effect.run_id) in job.admin_comment
        return SlurmEffect(
            f"job {job_id}",
            f"job {job_id} is {'+'.join(sorted(job.states))} and not held",
            is_ours=job.is_held and is_marked,
            is_taken=job.is_held and not is_marked,
        )

    def name_in(self, effect: LeasedEffect, topology: SlurmTopology) -> str:
        return _job_of(effect) or ""

    def stands(self, effect: LeasedEffect, name: str, topology: SlurmTopology) -> bool:
        is_listed = not topology.whole_by_id.keys().isdisjoint((name, name.partition("_")[0]))
        # slurmctld has forgotten an unlisted job, or hides it: a look would not find it either.
        return not is_listed or _hold_mark(effect.run_id) in topology.withheld.held.get(name, "")


def _job_of(effect: LeasedEffect) -> str | None:
    params = SlurmJobParams.model_validate(effect.params, context=ON_RECORD)
    target = effect.target.job or ""
    return changed_job(params, effect.output) or (target.removeprefix(SLURM) if target.startswith(SLURM) else None)


class SlurmReleaseJob(Irreversible, JobAction):
    name: ClassVar[str] = "slurm.release"
    summary: ClassVar[str] = "Release a held Slurm job."
    Params: ClassVar[type[BaseModel]] = SlurmReleaseParams
    gives_back: ClassVar[bool] = True

    async def perform(self, call: Call) -> Mapping[str, Any]:
        job_id, mark = await self.job_id(call), _hold_mark(call.run_id)
        is_undo = cast(SlurmReleaseParams, call.params).restore

        async def attempt() -> Mapping[str, Any]:
            job = await self.slurm.job(job_id)
            if is_undo and mark not in job.admin_comment:
                return job_state(job, "held by another, or not at all: nothing to take back")
            # A release ends the holds of all runs. A mark left behind would claim a later hold by a person.
            comment = job.admin_comment.replace(mark, "") if is_undo else _HOLD_MARKS.sub("", job.admin_comment)
            others = _HOLD_MARKS.search(comment) is not None
            if job.is_held and not job.has_ended and not others:
                for part in job.parts:
                    await self.slurm.unhold(part)
                if (await self.slurm.job(job_id)).is_held:
                    raise TemporaryFailure(f"Slurm does not release job {job_id}", job_state(job))
            if comment != job.admin_comment:
                await self.slurm.set_admin_comment(job_id, comment)
            return job_state(await self.slurm.job(job_id), "stays held for other runs" if others else "")

        return await self.retry_until_deadline(call, self.unless_gone(job_id, attempt) if is_undo else attempt)


ACTIONS: tuple[type[Action], ...] = (SlurmHold, SlurmReleaseJob)
