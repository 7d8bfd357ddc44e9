"""Action ``slurm.update``. The job's admin comment keeps the previous values for an undo after a crash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal, cast

from msgspec import structs
from pydantic import BaseModel, Field, model_validator

from trainmedic_core.fields import Duration
from trainmedic_server.actions.slurm import JobAction, SlurmJobParams, changed_job, find_node, job_state
from trainmedic_server.actions.slurm_marks import PREFIX
from trainmedic_server.domain import host_lists
from trainmedic_server.errors import ObjectMissing, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Action, Call, Inverse
from trainmedic_server.ports.slurm import UNLIMITED, JobChange, SlurmJob

_NODE = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_MINUTE = timedelta(minutes=1)


class SlurmUpdateParams(SlurmJobParams):
    exclude_nodes: tuple[Annotated[str, Field(pattern=_NODE)], ...] = Field(
        (),
        max_length=1000,
        description="Nodes that the job must not get, in addition to those that it excludes already, by NodeName, "
        "host name or address. The job must be pending.",
    )
    # To Slurm, 0 means held, and 2**32 - 2 no value.
    priority: int | None = Field(
        None, ge=1, lt=2**32 - 2, description="New priority. From then on Slurm computes none for the job."
    )
    time_limit: Duration | None = Field(
        None, ge=_MINUTE, description="New time limit, counted from the job's start, in whole minutes."
    )
    restore: Literal[True] | None = Field(None, description="As an undo: back to the values from before the step.")

    @model_validator(mode="after")
    def _changes_something(self) -> SlurmUpdateParams:
        if not (self.exclude_nodes or self.priority or self.time_limit):
            raise ValueError("give at least one of exclude_nodes, priority and time_limit")
        return self

    def wanted(self, before: JobChange, named: Collection[str]) -> JobChange:
        """`before` are the job's values, `named` the NodeNames of exclude_nodes."""
        excluded = {*(before.excluded_nodes or ()), *named}
        return JobChange(
            tuple(sorted(excluded)) if self.exclude_nodes else None,
            self.priority,
            round(self.time_limit / _MINUTE) * _MINUTE if self.time_limit else None,
        )

    def changed_params(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"restore"})


class SlurmUpdate(JobAction):
    name: ClassVar[str] = "slurm.update"
    summary: ClassVar[str] = (
        "Exclude nodes from a pending Slurm job, or change the priority or time limit of a job. Undo restores the "
        "values that no one has changed since."
    )
    Params: ClassVar[type[BaseModel]] = SlurmUpdateParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params, job_id = cast(SlurmUpdateParams, call.params), await self.job_id(call)

        async def change() -> Mapping[str, Any]:
            named = [(await find_node(self.slurm, name)).name for name in params.exclude_nodes]
            for part in (await self.slurm.job(job_id)).parts:
                await self._change(part, call.run_id, params, named)
            return job_state(await self.slurm.job(job_id))

        async def restore() -> Mapping[str, Any]:
            parts = (await self.slurm.job(job_id)).parts
            named = [await self._node_name_or_given(name) for name in params.exclude_nodes]
            notes = [await self._restore(part, call.run_id, params, named) for part in parts]
            return job_state(await self.slurm.job(job_id), "; ".join(dict.fromkeys(filter(None, notes))))

        if params.restore:
            return await self.retry_until_deadline(call, self.unless_gone(job_id, restore))
        return await self.retry_until_deadline(call, change)

    async def _node_name_or_given(self, node: str) -> str:
        try:
            return (await find_node(self.slurm, node)).name
        except ObjectMissing:
            return node

    async def _change(self, job_id: str, run_id: str, params: SlurmUpdateParams, named: Collection[str]) -> None:
        job = await self.unended_job(job_id)
        if params.priority is not None and job.is_held:
            raise PermanentFailure(f"job {job_id} is held, and a new priority would release it", job_state(job))
        begun = _mark(run_id, params).search(job.admin_comment)
        found = _values(job)
        before = (
            _from_text(begun["values"]) if begun is not None else _only_fields_of(params.wanted(found, named), found)
        )
        if begun is None:
            # Before the act: an attempt after a crash, and the undo, need the values from before.
            text = f"[{_key(run_id, params)} {_as_text(before)}]"
            await self.slurm.set_admin_comment(job_id, f"{job.admin_comment}{text}")
        await self._set(job_id, params.wanted(before, named))

    async def _restore(self, job_id: str, run_id: str, params: SlurmUpdateParams, named: Collection[str]) -> str:
        """Return a note on what was not restored, "" if all was."""
        job = await self.slurm.job(job_id)
        mark = _mark(run_id, params)
        begun = mark.search(job.admin_comment)
        if begun is None or job.has_ended:
            return "it has ended, or this step has not changed it: nothing to take back"
        before, found = _from_text(begun["values"]), _values(job)
        back, notes = {}, []
        for field, value in structs.asdict(params.wanted(before, named)).items():
            if value is None or getattr(found, field) == getattr(before, field):  # an earlier attempt may have restored
                continue
            if getattr(found, field) != value:
                notes.append(f"{field} has been changed since, and stays")
            elif field == "excluded_nodes" and "PENDING" not in job.states:
                notes.append("the job runs, and keeps its excluded nodes")  # Slurm refuses to change them
            else:
                back[field] = getattr(before, field)
        if back:
            await self._set(job_id, JobChange(**back))
        await self.slurm.set_admin_comment(job_id, mark.sub("", job.admin_comment))
        return "; ".join(notes)

    async def _set(self, job_id: str, change: JobChange) -> None:
        await self.slurm.update(job_id, change)
        after = await self.slurm.job(job_id)
        if _only_fields_of(change, _values(after)) != change:
            raise TemporaryFailure(f"Slurm has not changed job {job_id} as asked", job_state(after))

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        assert isinstance(params, SlurmUpdateParams)
        job_id = changed_job(params, output)
        undo = {**params.changed_params(), **({"job_id": job_id} if job_id else {}), "restore": True}
        return None if params.restore else Inverse(cls.name, undo)


def _key(run_id: str, params: SlurmUpdateParams) -> str:
    """Return the beginning of a step's mark. The digest distinguishes steps of one run."""
    values = sorted((name, value) for name, value in params.changed_params().items() if name != "job_id")
    digest = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
    return f"{PREFIX}update {run_id} {digest}"


def _mark(run_id: str, params: SlurmUpdateParams) -> re.Pattern[str]:
    return re.compile(rf"\[{re.escape(_key(run_id, params))} (?P<values>[^\]]*)\]")


def _values(job: SlurmJob) -> JobChange:
    return JobChange(_all_nodes(job.excluded_nodes), job.priority, job.time_limit or UNLIMITED)


def _all_nodes(names: Iterable[str]) -> tuple[str, ...]:
    """Expand host lists, in which Slurm may write several nodes."""
    try:
        return tuple(sorted(host_lists.expand(",".join(names))))
    except host_lists.UnreadableHostList as error:
        raise PermanentFailure(f"the job's list of excluded nodes {error}: change it with scontrol") from error


def _only_fields_of(change: JobChange, values: JobChange) -> JobChange:
    """Return `values` with None for the fields that `change` leaves."""
    return JobChange(**{name: getattr(values, name) for name, new in structs.asdict(change).items() if new is not None})


def _as_text(values: JobChange) -> str:
    parts = []
    if values.excluded_nodes is not None:
        parts.append(f"exclude={','.join(values.excluded_nodes)}")
    if values.priority is not None:
        parts.append(f"priority={values.priority}")
    if values.time_limit is not None:
        minutes = "unlimited" if values.time_limit == UNLIMITED else str(values.time_limit // _MINUTE)
        parts.append(f"minutes={minutes}")
    return " ".join(parts)


def _from_text(text: str) -> JobChange:
    values = dict(part.split("=", 1) for part in text.split() if "=" in part)
    excluded, priority, minutes = values.get("exclude"), values.get("priority", ""), values.get("minutes")
    limit = None
    if minutes is not None:
        limit = int(minutes) * _MINUTE if minutes.isdigit() else UNLIMITED
    return JobChange(
        tuple(name for name in excluded.split(",") if name) if excluded is not None else None,
        int(priority) if priority.isdigit() else None,
        limit,
    )


ACTIONS: tuple[type[Action], ...] = (SlurmUpdate,)
