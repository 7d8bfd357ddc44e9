"""Actions on nodes and jobs of Slurm.

Slurm has no conditional update and stores no author. So each action marks the runs whose change is in effect, in a
node's reason or a job's admin comment: a resumed attempt finds its change, and an undo spares those of others.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast

from pydantic import BaseModel, Field

from trainmedic_core.target import TargetKind
from trainmedic_server import errors
from trainmedic_server.actions.base import ActionParams, Irreversible, NoParams
from trainmedic_server.actions.retrying import RetryingAction
from trainmedic_server.actions.slurm_marks import BOOTING, PREFIX, is_out_for_reboot, marked, owners_of, reboot_mark
from trainmedic_server.domain.topology import SLURM, slurm_job_id
from trainmedic_server.domain.value_types import ANY, BOOLEAN, NUMBER, TEXT, Shape
from trainmedic_server.ports.actions import Action, Call
from trainmedic_server.ports.slurm import JobChange, Slurm, SlurmJob, SlurmNode

Attempt: TypeAlias = Callable[[], Awaitable[Mapping[str, Any]]]

Record = TypeVar("Record")

_JOB_ID = re.compile(r"[0-9]+([_+][0-9]+)?")
GONE = "it is gone: nothing to take back"


class SlurmAction(RetryingAction):
    service: ClassVar[str] = "Slurm"

    @property
    def slurm(self) -> Slurm:
        if self.services.slurm is None:
            raise errors.PermanentFailure("Slurm is not configured: start the server with --slurm-url or --slurm-agent")
        return self.services.slurm

    # Reads after a change. A refusal counts as unavailable: it says nothing about the change.
    async def read_back(self, reading: Awaitable[Record]) -> Record:
        try:
            return await reading
        except (errors.ClusterUnavailable, errors.ClusterRefused) as error:
            raise errors.ClusterUnavailable(f"changed, but not read again: {error}", may_be_done=True) from error


# --- nodes ------------------------------------------------------------------------------------------------


class NodeAction(SlurmAction):
    leaves_disks: ClassVar[bool] = True
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.NODE, TargetKind.GPU})
    outputs: ClassVar[Mapping[str, Shape]] = {
        **dict.fromkeys(("node", "state", "reason", "note"), TEXT),
        "changed": BOOLEAN,
    }

    async def find(self, call: Call) -> SlurmNode:
        if call.target.node is None:
            raise errors.PermanentFailure(f"{self.name} needs a node; {call.target.key} has none")
        return await self.named(call.target.node)

    async def named(self, name: str) -> SlurmNode:
        return await find_node(self.slurm, name)


async def find_node(slurm: Slurm, name: str) -> SlurmNode:
    """Find by NodeName, else by host name or address, else by its name before the first dot.

    Raises ObjectMissing, PermanentFailure if several match.
    """
    try:
        return await slurm.node(name)
    except errors.ObjectMissing:
        nodes = await slurm.nodes()
    if not nodes:  # From ObjectMissing, an undo would conclude that the node was deleted.
        raise errors.ClusterUnavailable("Slurm lists no nodes: check that the user of the token may see them")
    short = name.partition(".")[0]
    matching = [each for each in nodes if name in (each.hostname, each.address)]
    matching = matching or [each for each in nodes if short in (each.name, each.hostname.partition(".")[0])]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise errors.PermanentFailure(
            f"{name} may be any of the Slurm nodes {', '.join(each.name for each in matching)}"
        )
    raise errors.ObjectMissing(f"Slurm has no node with the name, host name or address {name}")


# Part of the output of a step that found the wanted state.
UNCHANGED: Mapping[str, Any] = {"changed": False}


def node_state(node: SlurmNode, note: str = "") -> dict[str, Any]:
    state = {"node": node.name, "state": "+".join(sorted(node.states)), "reason": node.reason}
    return {**state, "note": note} if note else state


class SlurmResumeParams(ActionParams):
    restore: Literal[True] | None = Field(None, description="As an undo: end this run's own drain.")


class SlurmResume(Irreversible, NodeAction):
    name: ClassVar[str] = "slurm.resume"
    summary: ClassVar[str] = (
        "End a drain of Trainmedic's, or return a node that slurm.reboot has rebooted. It fails if the node is drained "
        "with another's reason."
    )
    Params: ClassVar[type[BaseModel]] = SlurmResumeParams
    gives_back: ClassVar[bool] = True

    async def perform(self, call: Call) -> Mapping[str, Any]:
        is_undo = cast(SlurmResumeParams, call.params).restore

        async def attempt() -> Mapping[str, Any]:
            node = await self.find(call)
            owners = owners_of(node.reason)
            if is_out_for_reboot(node):
                if is_undo:
                    return node_state(node, "it stays out of service for its reboot: slurm.resume returns it")
                return await self._return_rebooted(node)
            if not node.is_drained:
                return node_state(node, "not drained: nothing to take back")
            if not owners or (is_undo and call.run_id not in owners):
                message = f"node {node.name} stays drained: its reason is {node.reason!r}"
                if is_undo:
                    return node_state(node, message)
                raise errors.PermanentFailure(message, node_state(node))
            # A step of a playbook ends the drains of all runs.
            remaining = [each for each in owners if each != call.run_id] if is_undo else []
            try:
                if remaining:
                    await self.slurm.set_reason(node.name, marked(remaining, node.reason.partition(" ")[2]))
                else:
                    await self.slurm.undrain(node.name)
            except errors.ClusterRefused:  # a request whose answer was lost may have come through
                if (await self.slurm.node(node.name)).is_drained:
                    raise
            after = await self.slurm.node(node.name)
            if after.is_drained and call.run_id in owners_of(after.reason):
                raise errors.TemporaryFailure(f"Slurm did not end the drain of node {node.name}", node_state(after))
            if remaining:
                return node_state(after, "stays drained for other runs")
            return node_state(after)

        try:
            return await self.retry_until_deadline(call, attempt)
        except errors.ObjectMissing:
            if not is_undo:
                raise
            return {"node": call.target.node, "note": GONE}

    async def _return_rebooted(self, node: SlurmNode) -> Mapping[str, Any]:
        """Return a rebooted node to service. Raises ClusterUnavailable until it has come back."""
        coming = sorted(node.states & {*BOOTING, "NOT_RESPONDING"})
        if coming:
            raise errors.ClusterUnavailable(f"node {node.name} has not come back from its reboot: {'+'.join(coming)}")
        await self.slurm.return_to_service(node.name)
        after = await self.slurm.node(node.name)
        if after.is_out_of_service:
            raise errors.TemporaryFailure(f"Slurm has not returned node {node.name} to service", node_state(after))
        return node_state(after)


class SlurmReboot(Irreversible, NodeAction):
    """A resumed attempt finds its request by the command's mark in the node's reason."""

    name: ClassVar[str] = "slurm.reboot"
    asks_first: ClassVar[bool] = True
    leaves_disks: ClassVar[bool] = False
    summary: ClassVar[str] = (
        "Let Slurm reboot the node as soon as no job runs on it. No new job starts, and the node stays down until "
        "slurm.resume. Only through an agent."
    )
    Params: ClassVar[type[BaseModel]] = NoParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        mark = reboot_mark(call.command_id)

        async def attempt() -> Mapping[str, Any]:
            node = await self.find(call)
            if mark in node.reason.split():
                return node_state(node, _describe_progress(node.states))
            owners = owners_of(node.reason) if node.is_out_of_service else ()
            if node.is_out_of_service and not owners:
                raise taken_by_another(node, "a reboot")
            reason = marked(dict.fromkeys((*owners, call.run_id)), f"{mark} {call.reason}")
            await self.slurm.reboot(node.name, reason)
            after = await self.slurm.node(node.name)
            if mark not in after.reason.split():
                raise errors.TemporaryFailure(f"Slurm has not taken the reboot of node {node.name}", node_state(after))
            return node_state(after, _describe_progress(after.states))

        return await self.retry_until_deadline(call, attempt)


def taken_by_another(node: SlurmNode, change: str) -> errors.TemporaryFailure:
    return errors.TemporaryFailure(
        f"node {node.name} was left as it is: it is {'+'.join(sorted(node.states))} with the reason {node.reason!r}, "
        f"which {change} would replace",
        node_state(node),
    )


def _describe_progress(states: frozenset[str]) -> str:
    if "REBOOT_REQUESTED" in states:
        return "Slurm reboots it as soon as no job runs on it"
    if "REBOOT_ISSUED" in states:
        return "Slurm has ordered its reboot"
    return "Slurm has no reboot of it pending: it has rebooted, or failed to"


# --- jobs -------------------------------------------------------------------------------------------------


class SlurmJobParams(ActionParams):
    job_id: str | None = Field(
        None,
        pattern=rf"^{_JOB_ID.pattern}$",
        description="The Slurm id of the job, such as {{ labels.slurm_job_id }}. By default that of a target such as "
        "job:slurm:4711, or the one that a target job with the SDK reports.",
    )


class JobAction(SlurmAction):
    outputs: ClassVar[Mapping[str, Shape]] = {
        "job_id": ANY,
        "state": TEXT,
        "held": BOOLEAN,
        "restarts": NUMBER,
        "nodes": ANY,
        "note": TEXT,
        "changed": BOOLEAN,
    }
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB, TargetKind.NODE, TargetKind.GPU})

    async def job_id(self, call: Call) -> str:
        job_id = cast(SlurmJobParams, call.params).job_id
        if job_id is not None:
            return job_id
        target = call.target.job or ""
        named = target.removeprefix(SLURM) if target.startswith(SLURM) else await self._reported_id(target)
        if named is not None and _JOB_ID.fullmatch(named):
            return named
        raise errors.PermanentFailure(
            f"the Slurm job is not known: give job_id, or a target such as job:{SLURM}4711 instead of {call.target.key}"
        )

    async def _reported_id(self, job: str) -> str | None:
        """Return the ID that the job's SDK reports, or reported before the job was gone."""
        try:
            present = await self.services.bus.jobs() if job else ()
        except errors.BusUnavailable:
            present = ()
        ids = (slurm_job_id(each.details) for each in present if each.name == job)
        return next(ids, None) or self.services.slurm_id_of(job)

    def unless_gone(self, job_id: str, attempt: Attempt) -> Attempt:
        """Return an undo's attempt that succeeds if the job is gone.

        Jobs hidden from the server's user are missing too. Slurm refuses changes to them, but answers "invalid job id"
        for gone ones.
        """

        async def tried() -> Mapping[str, Any]:
            try:
                return await attempt()
            except errors.ObjectMissing:
                try:
                    await self.slurm.update(job_id, JobChange())  # no change: asks whether it exists
                except errors.ObjectMissing:
                    return {"job_id": job_id, "note": GONE}
                raise errors.ClusterUnavailable(
                    f"Slurm knows job {job_id}, but does not show it to the server"
                ) from None

        return tried

    async def unended_job(self, job_id: str) -> SlurmJob:
        """Raises PermanentFailure if it has ended."""
        job = await self.slurm.job(job_id)
        if job.has_ended:
            raise errors.PermanentFailure(f"job {job_id} has ended: it is {_states(job)}", job_state(job))
        return job


def changed_job(params: SlurmJobParams, output: Mapping[str, Any] | None) -> str | None:
    """Return the job for the undo, None as long as only the target names it."""
    changed = (output or {}).get("job_id")
    return params.job_id or (changed if isinstance(changed, str) else None)


def _states(job: SlurmJob) -> str:
    return "+".join(sorted(job.states))


def job_state(job: SlurmJob, note: str = "") -> dict[str, Any]:
    state = {
        "job_id": job.job_id,
        "state": _states(job),
        "held": job.is_held,
        "restarts": job.restarts,
        "nodes": job.nodes,
    }
    return {**state, "note": note} if note else state


_REQUEUE_MARKS = re.compile(rf"\[{PREFIX}requeue [^\]]*\]")


class SlurmRequeueParams(SlurmJobParams):
    hold: bool = Field(False, description="Let the job wait for a release instead of starting again.")
    at_once: bool = Field(
        False, description="Let the job start as soon as it has nodes. Otherwise Slurm waits for two minutes."
    )
    max_restarts: int = Field(
        3, ge=1, le=1000, description="Refuse to requeue a job that has been restarted this often already."
    )


class SlurmRequeue(Irreversible, JobAction):
    name: ClassVar[str] = "slurm.requeue"
    summary: ClassVar[str] = (
        "End a running Slurm job and queue it again. Let it save a checkpoint before. Over slurmrestd it needs Slurm "
        "26.05."
    )
    default_timeout: ClassVar[timedelta] = timedelta(minutes=3)
    silences: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})
    Params: ClassVar[type[BaseModel]] = SlurmRequeueParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params, job_id = cast(SlurmRequeueParams, call.params), await self.job_id(call)
        intent = re.compile(rf"\[{PREFIX}requeue {re.escape(call.command_id)} (\d+)\]")

        async def attempt() -> Mapping[str, Any]:
            job = await self.slurm.job(job_id)
            begun = intent.search(job.admin_comment)  # with the number of restarts before the requeue
            if begun is not None and job.restarts > int(begun[1]):
                return await self._finish(job, params.at_once)
            if job.has_ended:
                raise errors.PermanentFailure(f"job {job_id} has ended: it is {_states(job)}", job_state(job))
            if not job.may_requeue:
                raise errors.PermanentFailure(
                    f"job {job_id} may not be requeued: submit it with --requeue", job_state(job)
                )
            if job.restarts >= params.max_restarts:
                raise errors.PermanentFailure(
                    f"job {job_id} has been restarted {job.restarts} times, and max_restarts is {params.max_restarts}",
                    job_state(job),
                )
            if begun is None:
                # Before the act, so that an attempt after a crash can tell whether the job was requeued.
                # The mark stays: without it, an attempt after a crash would requeue the job again. The next one
                # replaces it.
                mark = f"[{PREFIX}requeue {call.command_id} {job.restarts}]"
                await self.slurm.set_admin_comment(job_id, f"{_REQUEUE_MARKS.sub('', job.admin_comment)}{mark}")
                before = job.restarts
            else:
                before = int(begun[1])
            try:
                await self.slurm.requeue(job_id, params.hold)
                after = await self.slurm.job(job_id)
            except errors.ClusterRefused:  # such as "pending", if a request whose answer was lost has come through
                after = await self.slurm.job(job_id)
                # Slurm counts the restart when the job's processes have ended.
                if after.restarts <= before and "COMPLETING" not in after.states:
                    raise
            if after.restarts <= before:
                raise errors.ClusterUnavailable(f"Slurm has not requeued job {job_id} yet", may_be_done=True)
            return await self._finish(after, params.at_once)

        return await self.retry_until_deadline(call, attempt)

    async def _finish(self, job: SlurmJob, at_once: bool) -> Mapping[str, Any]:
        if at_once and "COMPLETING" in job.states:  # Slurm sets the delay when the job's processes have ended.
            raise errors.ClusterUnavailable(f"the processes of job {job.job_id} have not ended yet", may_be_done=True)
        for part in job.parts if at_once and "PENDING" in job.states else ():
            await self.slurm.end_delay(part)
        return job_state(job)


class SlurmSignalParams(SlurmJobParams):
    signal: str = Field(
        pattern=r"^(USR1|USR2|HUP|INT|TERM|CONT|STOP)$",
        description="The signal: USR1, USR2, HUP, INT, TERM, CONT or STOP. Many trainers save a checkpoint on USR1.",
    )
    batch: bool = Field(
        False,
        description="Signal the batch script and its children too, as a training without srun needs. A script "
        "that does not trap the signal ends by it.",
    )


class SlurmSignal(Irreversible, JobAction):
    name: ClassVar[str] = "slurm.signal"
    summary: ClassVar[str] = "Send a signal to the steps of a Slurm job. Whether the job acts on it is not known."
    Params: ClassVar[type[BaseModel]] = SlurmSignalParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params, job_id = cast(SlurmSignalParams, call.params), await self.job_id(call)
        if call.resumed:
            raise errors.OutcomeUnknown("the signal may have been sent, and a second one may do harm")
        job = await self.unended_job(job_id)
        if "RUNNING" not in job.states:
            raise errors.TemporaryFailure(f"job {job_id} is {_states(job)}", job_state(job))
        try:
            await self.slurm.signal(job_id, params.signal, params.batch)
        except errors.ClusterUnavailable as error:
            if error.may_be_done:  # A failed attempt would be retried.
                raise errors.OutcomeUnknown(f"the signal may have been sent: {error}") from error
            raise
        # The state before the signal: if another reading failed, the signal would be sent again.
        return job_state(job, "Slurm has taken the signal")


class SlurmCancel(Irreversible, JobAction):
    name: ClassVar[str] = "slurm.cancel"
    summary: ClassVar[str] = "End a Slurm job for good."
    silences: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})
    Params: ClassVar[type[BaseModel]] = SlurmJobParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        job_id = await self.job_id(call)

        async def attempt() -> Mapping[str, Any]:
            job = await self.slurm.job(job_id)
            if job.has_ended:
                return job_state(job, "" if call.resumed else "it had ended already")
            await self.slurm.cancel(job_id)
            job = await self.slurm.job(job_id)
            if not job.has_ended:
                raise errors.TemporaryFailure(f"job {job_id} is still {_states(job)}", job_state(job))
            return job_state(job)

        return await self.retry_until_deadline(call, attempt)


ACTIONS: tuple[type[Action], ...] = (
    SlurmResume,
    SlurmReboot,
    SlurmRequeue,
    SlurmSignal,
    SlurmCancel,
)
