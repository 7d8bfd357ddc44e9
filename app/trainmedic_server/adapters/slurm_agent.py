"""Slurm through an agent on a node with scontrol and scancel; implements `ports.slurm.Slurm`.

Each change is one signed command that the agent journals and runs once. Readings are not journaled.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from msgspec import Struct

from trainmedic.wire import envelope
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain import log_pages
from trainmedic_server.adapters import slurm_errors
from trainmedic_server.adapters.slurm_json import (
    API_VERSIONS,
    FIELDS,
    is_responding,
    job_in,
    jobs_of,
    members_of,
    node_in,
    nodes_of,
    release_of,
    reservations_of,
)
from trainmedic_server.errors import ActionFailure, ClusterRefused, ClusterUnavailable, ObjectMissing
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.outside import Clock, CommandBus, final_replies, own_command
from trainmedic_server.ports.slurm import (
    UNLIMITED,
    JobChange,
    SlurmJob,
    SlurmNode,
    SlurmRelease,
    SlurmReservation,
)

TIMEOUT = timedelta(seconds=20)  # For one command. slurmctld answers late while it schedules thousands of jobs.
_LARGEST_DOCUMENT = 64 * 1024 * 1024  # bytes
_REMEDY = "check the rights of the agent's user in Slurm"
_UNLIMITED = "unlimited"
_NO_PARTITION = "Invalid partition name specified"
"""Slurm's refusal of an update that only asks whether the server may change the job."""
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")  # The names that agents pass to Slurm

Record = TypeVar("Record")


class _Listed(Struct, frozen=True):
    digest: str
    records: Sequence[Any]


class SlurmAgent:
    def __init__(self, bus: CommandBus, clock: Clock, node: str, fence: Fence = no_fence) -> None:
        """`node`: the agent's name. `fence` is called before each change and does not return if this server may not
        act.
        """
        self._bus = bus
        self._clock = clock
        self._node = node
        self._fence = fence
        self._agent = f"the agent on node {node!r}"
        self._lists: dict[str, _Listed] = {}

    async def release(self) -> SlurmRelease:
        answer = await self._read("ping", "pings")
        if not is_responding(answer):
            raise ClusterUnavailable("slurmctld does not respond to scontrol")
        return SlurmRelease(release_of(answer), can_requeue=True, can_reserve=True, can_reboot=True)

    async def node(self, name: str) -> SlurmNode:
        if not _NODE_NAME.fullmatch(name):
            raise ObjectMissing(f"{name!r:.200} is no NodeName of Slurm")  # it may be an address
        try:
            return node_in(await self._read("node", "nodes", name), name)
        except ObjectMissing:
            if any(each.name == name for each in await self.nodes()):
                raise ClusterUnavailable(f"scontrol does not show node {name}, which Slurm lists") from None
            raise

    async def nodes(self) -> Sequence[SlurmNode]:
        return await self._all("nodes", nodes_of)

    async def job(self, job_id: str) -> SlurmJob:
        # The leader's id lists all components.
        try:
            return job_in(await self._read("job", "jobs", job_id.partition("+")[0]), job_id)
        except ObjectMissing:
            # scontrol shows nothing also if slurmctld does not answer. The whole list proves an answer.
            if any(job_id in (each.job_id, *each.other_ids) for each in await self.jobs()):
                raise ClusterUnavailable(f"scontrol does not show job {job_id}, which Slurm lists") from None
            raise

    async def jobs(self) -> Sequence[SlurmJob]:
        return await self._all("jobs", jobs_of)

    async def drain(self, node: str, reason: str, resume_after: timedelta | None = None) -> None:
        end: dict[str, Any] = {}
        if resume_after is not None:
            is_unlimited = resume_after == UNLIMITED
            end["resume_after"] = _UNLIMITED if is_unlimited else max(1, round(resume_after.total_seconds()))
        await self._change("slurm.drain", {"node": node, "reason": reason, **end})

    async def set_reason(self, node: str, reason: str) -> None:
        await self._change("slurm.resume", {"node": node, "reason": reason})

    async def undrain(self, node: str) -> None:
        await self._change("slurm.resume", {"node": node})

    async def reboot(self, node: str, reason: str) -> None:
        await self._change("slurm.reboot", {"node": node, "reason": reason})

    async def return_to_service(self, node: str) -> None:
        await self._change("slurm.resume", {"node": node, "is_down": True})

    async def reservations(self) -> Sequence[SlurmReservation]:
        return reservations_of(await self._read("reservations", "reservations"))

    async def reserve(self, name: str, node: str, users: Sequence[str], lasting: timedelta) -> None:
        minutes = max(1, round(lasting / timedelta(minutes=1)))
        await self._change("slurm.reserve", {"reservation": name, "node": node, "users": [*users], "minutes": minutes})

    async def end_reservation(self, name: str) -> None:
        await self._change("slurm.reserve", {"reservation": name, "is_end": True})

    async def hold(self, job_id: str) -> None:
        await self._change_job("slurm.hold", job_id)

    async def unhold(self, job_id: str) -> None:
        await self._change_job("slurm.release", job_id)

    async def requeue(self, job_id: str, hold: bool = False) -> None:
        await self._change_job("slurm.requeue", job_id, hold=hold)

    async def end_delay(self, job_id: str) -> None:
        await self._change_job("slurm.requeue", job_id, ends_delay=True)

    async def signal(self, job_id: str, signal: str, with_batch: bool = False) -> None:
        await self._change_job("slurm.signal", job_id, signal=signal, with_batch=with_batch)

    async def cancel(self, job_id: str) -> None:
        await self.job(job_id)  # scancel reports success for a job that does not exist
        await self._change_job("slurm.cancel", job_id)

    async def update(self, job_id: str, change: JobChange) -> None:
        new: dict[str, Any] = {}
        if change.excluded_nodes is not None:
            new["excluded_nodes"] = list(change.excluded_nodes)
        if change.priority is not None:
            new["priority"] = change.priority
        if change.time_limit is not None:
            is_unlimited = change.time_limit == UNLIMITED
            new["time_limit"] = _UNLIMITED if is_unlimited else round(change.time_limit / timedelta(minutes=1))
        if new:
            await self._change_job("slurm.update", job_id, **new)
            return
        try:
            await self._change_job("slurm.comment", job_id, only_asks=True)
        except ClusterRefused as error:
            if _NO_PARTITION not in str(error):
                raise

    async def set_admin_comment(self, job_id: str, text: str) -> None:
        await self._change_job("slurm.comment", job_id, text=text)

    async def _change_job(self, action: str, job_id: str, **params: Any) -> None:
        own_id = (await self.job(job_id)).job_id if "+" in job_id else job_id
        await self._change(action, {"job": own_id, **params})

    async def _change(self, action: str, params: Mapping[str, Any]) -> None:
        self._fence()
        await self._ask(action, params, is_change=True)

    async def _all(self, kind: str, read: Callable[[Mapping[str, Any]], Sequence[Record]]) -> Sequence[Record]:
        """Return a list. The agent sends it only if it has changed since the last call."""
        known = self._lists.get(kind)
        digest, document = await self._document("slurm.list", kind, kind, None, known.digest if known else None)
        if document is None and known is not None:
            return known.records
        records = await asyncio.to_thread(read, document or {})
        self._lists[kind] = _Listed(digest, records)
        return records

    async def _read(self, what: str, kind: str, name: str | None = None) -> Mapping[str, Any]:
        _, document = await self._document("slurm.read", what, kind, name, None)
        return document or {}

    async def _document(
        self, action: str, what: str, kind: str, name: str | None, known: str | None
    ) -> tuple[str, Mapping[str, Any] | None]:
        """Return a document and its digest; None if it is the `known` one. Raises ObjectMissing, ClusterRefused,
        ClusterUnavailable, also for errors that the document states.
        """
        fields = FIELDS.get(what, FIELDS[kind])
        given = {"what": what, "fields": fields, "parsers": API_VERSIONS, **({"name": name} if name else {})}
        first = await self._ask(action, {**given, **({"known": known} if known else {})})
        digest = str(first.get("digest"))
        if first.get("unchanged") and digest == known:
            return digest, None
        pieces = [*_pieces(first)]
        pages = first.get("pages")
        for page in range(1, pages if isinstance(pages, int) else 1):
            pieces += _pieces(await self._ask(action, {**given, "known": digest, "page": page}))
        try:
            document = await asyncio.to_thread(log_pages.unpacked, pieces, _LARGEST_DOCUMENT)
        except ValueError as error:
            raise ClusterUnavailable(f"{self._agent} sends a document that cannot be read: {error}") from error
        for each in members_of(document, "errors"):
            if number := each.get("error_number"):
                text = f"Slurm: {each.get('error')} ({number}): {each.get('description')}"
                raise slurm_errors.failure(number, text, False, _REMEDY)
        if not isinstance(document.get(kind), list):
            raise ClusterUnavailable(f"{self._agent} sends no {kind} of Slurm")
        return digest, document

    async def _ask(self, action: str, params: Mapping[str, Any], is_change: bool = False) -> Mapping[str, Any]:
        now, reason = self._clock.now(), "the server reads and changes Slurm through this agent"
        command = own_command(action, Target(TargetKind.NODE, node=self._node), params, reason, now, now + TIMEOUT)
        reply = next(iter(await final_replies(self._bus, command)), None)
        if reply is None:
            text = f"{self._agent} did not answer in time; 'trainmedic agents' lists the connected ones"
            raise ClusterUnavailable(text, may_be_done=is_change)
        if reply.status == envelope.APPLIED:
            return reply.output
        may_be_done = is_change and reply.output.get("may_be_done", reply.status == envelope.FAILED) is not False
        text = f"{self._agent}: {reply.output.get('reason') or reply.status}"
        if reply.status == envelope.FAILED:
            raise _failure(text, is_change, may_be_done)
        if may_be_done or reply.status == envelope.EXPIRED:
            raise ClusterUnavailable(text, may_be_done=may_be_done)
        hint = "; its policy needs the part slurm" if reply.status == envelope.UNSUPPORTED else ""
        raise ClusterRefused(f"{text}{hint}")


def _pieces(output: Mapping[str, Any]) -> Sequence[str]:
    page = output.get("page")
    return page if isinstance(page, list) else ()


def _failure(text: str, is_change: bool, may_be_done: bool) -> ActionFailure:
    number = slurm_errors.number_in(text)
    if is_change and not may_be_done and number is None:
        return ClusterRefused(text)  # the command has ended with a reason of Slurm's
    is_change = is_change and (may_be_done or not text.endswith(slurm_errors.NOTHING_CHANGED))
    return slurm_errors.failure(None if may_be_done else number, text, is_change, _REMEDY)
