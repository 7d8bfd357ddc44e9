"""Action ``slurm.drain``. A drain with a lease is renewed in each third of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, ClassVar, cast

from pydantic import BaseModel, Field, model_validator

from trainmedic_core.fields import Duration
from trainmedic_server.actions.base import ActionParams
from trainmedic_server.actions.slurm import UNCHANGED, NodeAction, SlurmResume, node_state, taken_by_another
from trainmedic_server.actions.slurm_marks import is_out_for_reboot, marked, owners_of
from trainmedic_server.actions.slurm_watched import LONGEST_LEASE, Known, LeasedNodeAction, SlurmEffect, may_be_done
from trainmedic_server.domain.topology import SlurmTopology
from trainmedic_server.domain.value_types import NUMBER, Shape
from trainmedic_server.errors import ActionFailure, TemporaryFailure
from trainmedic_server.ports.actions import ON_RECORD, Action, Call, Inverse, LeasedEffect
from trainmedic_server.ports.slurm import UNLIMITED, SlurmNode

SHORTEST_LEASE = timedelta(minutes=5)


class SlurmDrainParams(ActionParams):
    resume_after: Duration | None = Field(
        None,
        description="Slurm resumes the node by itself after this time, counted from the step. By default it stays "
        "drained until the undo.",
        gt=timedelta(0),
    )
    lease: Duration | None = Field(
        None,
        description="Slurm resumes the node by itself this long after the server last renewed the drain, from 5m to "
        "1h. The server renews it until the undo.",
        ge=SHORTEST_LEASE,
        le=LONGEST_LEASE,
    )

    @model_validator(mode="after")
    def _has_one_end(self) -> SlurmDrainParams:
        if self.lease is not None and self.resume_after is not None:
            raise ValueError("give lease or resume_after, not both")
        return self


class SlurmDrain(LeasedNodeAction):
    name: ClassVar[str] = "slurm.drain"
    summary: ClassVar[str] = (
        "Let Slurm start no new job on the node; running jobs continue. Undo ends the drain, unless its reason has "
        "been changed by another."
    )
    Params: ClassVar[type[BaseModel]] = SlurmDrainParams
    outputs: ClassVar[Mapping[str, Shape]] = {**NodeAction.outputs, "lease_seconds": NUMBER}

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(SlurmDrainParams, call.params)

        async def attempt() -> Mapping[str, Any]:
            return await self._drain(await self.find(call), call.run_id, call.reason, params)

        output = await self.retry_until_deadline(call, attempt)
        return {**output, "lease_seconds": params.lease.total_seconds()} if params.lease is not None else output

    async def _drain(self, node: SlurmNode, run_id: str, reason: str, params: SlurmDrainParams) -> Mapping[str, Any]:
        owners = owners_of(node.reason) if node.is_out_of_service else ()
        if node.is_drained and run_id in owners:
            return node_state(node)
        if node.is_out_of_service and not owners:
            if node.is_drained:
                return {**node_state(node, "drained by another already: the undo leaves it drained"), **UNCHANGED}
            raise taken_by_another(node, "a drain")
        marked_reason = marked(dict.fromkeys((*owners, run_id)), reason)
        try:
            after = await self._set_drain(node, run_id, marked_reason, _end_of_drain(node, owners, params))
        except ActionFailure as error:
            if may_be_done(error):  # its end is unknown, and a person may have ended it since
                self.note_end(node.name, (), None)
            raise
        owners = owners_of(after.reason)
        own_end = None if params.lease is None else self._clock.now() + params.lease
        self.note_end(after.name, owners, own_end if owners == (run_id,) else after.resume_after)
        return node_state(after)

    async def _set_drain(self, node: SlurmNode, run_id: str, reason: str, end: timedelta | None) -> SlurmNode:
        await self.slurm.drain(node.name, reason, end)
        after = await self.read_back(self.slurm.node(node.name))
        if not after.is_drained or run_id not in owners_of(after.reason):
            raise TemporaryFailure(
                f"node {node.name} was changed by another at the same time; it is now "
                f"{'+'.join(sorted(after.states))} with the reason {after.reason!r}",
                node_state(after),
            )
        return after

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse(SlurmResume.name, {"restore": True})

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        is_others = "reason" in output and not owners_of(str(output["reason"]))
        return timedelta(0) if is_others else super().granted(output)

    async def look(self, effect: LeasedEffect) -> SlurmEffect:
        node = await self.named(effect.target.node or "")
        is_ours = node.is_drained and effect.run_id in owners_of(node.reason)
        return SlurmEffect(
            node.name,
            f"node {node.name} is {'+'.join(sorted(node.states))} with the reason {node.reason!r}",
            is_ours,
            is_taken=node.is_out_of_service and not is_ours,
            node=node,
        )

    async def make_again(self, effect: LeasedEffect, found: SlurmEffect) -> None:
        reason = "drained again: its lease had expired"
        params = _params(effect).model_copy(update={"resume_after": self.time_left(effect)})
        await self._drain(await self.slurm.node(found.place), effect.run_id, reason, params)

    def can_join(self, found: SlurmEffect) -> bool:
        node = found.node
        return node is not None and node.is_drained and bool(owners_of(node.reason)) and not is_out_for_reboot(node)

    def stands(self, effect: LeasedEffect, name: str, topology: SlurmTopology) -> bool:
        if self.lease_of(effect) is not None:  # another's reason, or another run, may end the lease
            return owners_of(topology.withheld.drained.get(name, "")) == (effect.run_id,)
        return super().stands(effect, name, topology)

    def own_end(self, effect: LeasedEffect) -> timedelta | None:
        return _params(effect).resume_after

    def lease_of(self, effect: LeasedEffect) -> timedelta | None:
        return _params(effect).lease

    async def extend(self, effect: LeasedEffect, lease: timedelta, found: SlurmEffect, known: Known) -> None:
        node = found.node
        assert node is not None
        owners = owners_of(node.reason)
        # A drain of several runs has one end: that of the last renewal by any of them, none if one run wants none.
        if owners != (effect.run_id,):
            self.note_end(node.name, owners, node.resume_after)
            if node.resume_after is None:
                return
        is_soon = node.resume_after is None or node.resume_after < self._clock.now() + lease / 3
        if is_soon or self.is_due(effect, known):
            await self.slurm.drain(node.name, node.reason, lease)
            known.renewed_at = self._clock.now()
            self.note_end(node.name, owners, known.renewed_at + lease)


def _params(effect: LeasedEffect) -> SlurmDrainParams:
    return SlurmDrainParams.model_validate(effect.params, context=ON_RECORD)


def _end_of_drain(node: SlurmNode, owners: Collection[str], params: SlurmDrainParams) -> timedelta | None:
    """Return when Slurm ends the drain, from now. None changes nothing, `UNLIMITED` removes another run's end.

    Slurm keeps one end per node: none if one of the runs has none, otherwise that of the last drain.
    """
    end = params.lease or params.resume_after
    if not owners:
        return end
    if end is None:
        return UNLIMITED if node.resume_after is not None else None
    return end if node.resume_after is not None else None


ACTIONS: tuple[type[Action], ...] = (SlurmDrain,)
