"""Action ``slurm.drain``.

A drain without a lease is checked every `CHECK_EVERY`: a killed slurmctld loses the changes of its last seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, cast

from msgspec.structs import replace
from pydantic import BaseModel, Field, model_validator

from trainmedic_core.fields import Duration
from trainmedic_server.actions.base import ActionParams
from trainmedic_server.actions.slurm import NodeAction, SlurmResume, node_state
from trainmedic_server.actions.slurm_marks import marked, owners_of
from trainmedic_server.domain.value_types import NUMBER, Shape
from trainmedic_server.errors import ActionFailure, ClusterUnavailable, ObjectMissing, TemporaryFailure
from trainmedic_server.ports.actions import ON_RECORD, Action, Call, Inverse, LeasedEffect, Renewal, Services
from trainmedic_server.ports.slurm import UNLIMITED, SlurmNode

SHORTEST_LEASE, LONGEST_LEASE = timedelta(minutes=5), timedelta(hours=1)
CHECK_EVERY = timedelta(seconds=15)
_UNSAVED = timedelta(seconds=10)
"""slurmctld stores changes within about 5 s. Time after which one counts as stored."""


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


class SlurmDrain(NodeAction):
    name: ClassVar[str] = "slurm.drain"
    summary: ClassVar[str] = (
        "Let Slurm start no new job on the node; running jobs continue. Undo ends the drain, unless its reason has "
        "been changed by another."
    )
    Params: ClassVar[type[BaseModel]] = SlurmDrainParams
    outputs: ClassVar[Mapping[str, Shape]] = {**NodeAction.outputs, "lease_seconds": NUMBER}
    lease: ClassVar[timedelta] = LONGEST_LEASE

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._seen_at: dict[str, datetime] = {}  # when the node was last read as drained, by command ID
        self._ends_at: dict[str, datetime] = {}  # end of the lease that this process renewed last, by command ID

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
                return node_state(node, "drained by another already: the undo leaves it drained")
            raise TemporaryFailure(
                f"node {node.name} was left as it is: it is {'+'.join(sorted(node.states))} with the reason "
                f"{node.reason!r}, which a drain would replace",
                node_state(node),
            )
        marked_reason = marked(dict.fromkeys((*owners, run_id)), reason)
        await self.slurm.drain(node.name, marked_reason, _end_of_drain(node, owners, params))
        after = await self.slurm.node(node.name)
        if not after.is_drained or run_id not in owners_of(after.reason):
            raise TemporaryFailure(
                f"node {node.name} was changed by another at the same time; it is now "
                f"{'+'.join(sorted(after.states))} with the reason {after.reason!r}",
                node_state(after),
            )
        return node_state(after)

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse(SlurmResume.name, {"restore": True})

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        seconds = output.get("lease_seconds")
        return timedelta(seconds=seconds) if isinstance(seconds, int | float) and seconds > 0 else 3 * CHECK_EVERY

    async def renew(self, effects: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        """Renew leases, and check other drains. The result omits those that need no check."""
        until = max(until, self._clock.now() + SHORTEST_LEASE / 3)
        if not any(effect.again for effect in effects):
            command_ids = {effect.command_id for effect in effects}
            self._seen_at = {name: at for name, at in self._seen_at.items() if name in command_ids}
            self._ends_at = {name: at for name, at in self._ends_at.items() if name in command_ids}
        out = {node.name for node in self.services.slurm_topology().nodes if node.unavailable}
        renewals = [await self._renew_one(effect, out) for effect in effects if self._clock.now() < until]
        return [renewal for renewal in renewals if renewal is not None]

    async def _renew_one(self, effect: LeasedEffect, out: Collection[str]) -> Renewal | None:
        """`out`: nodes that took no jobs when Slurm was last read."""
        params = SlurmDrainParams.model_validate(effect.params, context=ON_RECORD)
        name = effect.target.node or ""
        if params.lease is None and not effect.again and self._needs_no_check(effect, params, out):
            return None
        try:
            node = await self.named(name)
            if node.is_drained:
                self._seen_at[effect.command_id] = self._clock.now()
            owners = owners_of(node.reason) if node.is_drained else ()
            if effect.run_id in owners:
                # A shared drain has no end if one of the runs wants none.
                if params.lease is not None and (owners == (effect.run_id,) or node.resume_after is not None):
                    await self.slurm.drain(node.name, node.reason, params.lease)
                    self._ends_at[effect.command_id] = self._clock.now() + params.lease
                return Renewal(effect, name, "renewed")
            if params.lease is None and node.is_out_of_service:
                return None  # by another's drain, as the step may have found it
            if effect.again and not node.is_out_of_service:
                reason = "drained again, because its lease had expired or Slurm had lost the drain"
                await self._drain(node, effect.run_id, reason, params)
                self._seen_at[effect.command_id] = self._clock.now()
                return Renewal(effect, name, "renewed")
        except (ClusterUnavailable, TemporaryFailure) as error:
            return Renewal(effect, name, "unanswered", str(error))
        except ObjectMissing as error:
            return Renewal(effect, name, "lost", str(error))
        except ActionFailure as error:
            return Renewal(effect, name, "refused", str(error))
        why = f"node {node.name} is {'+'.join(sorted(node.states))} with the reason {node.reason!r}"
        if self._is_unsaved(effect, node):
            return Renewal(replace(effect, is_unsaved=True), name, "lost", why, has_expired=True)
        return Renewal(effect, name, "lost", why, has_expired=self._has_expired(effect, node, params))

    def _needs_no_check(self, effect: LeasedEffect, params: SlurmDrainParams, out: Collection[str]) -> bool:
        if params.resume_after is not None and (
            effect.applied_at is None or self._clock.now() >= effect.applied_at + params.resume_after
        ):
            return True  # Slurm has ended it
        topology, name = self.services.slurm_topology(), effect.target.node or ""
        nodes = topology.names.called(name) or topology.names.related(name)
        is_out = bool(nodes) and nodes.issubset(out)
        return not topology.answers or (is_out and effect.command_id in self._seen_at)

    def _has_expired(self, effect: LeasedEffect, node: SlurmNode, params: SlurmDrainParams) -> bool:
        if params.lease is None or node.is_out_of_service:
            return False
        now, made_at = self._clock.now(), effect.applied_at
        return now >= self._ends_at.get(effect.command_id, made_at + params.lease if made_at is not None else now)

    def _is_unsaved(self, effect: LeasedEffect, node: SlurmNode) -> bool:
        """Return whether slurmctld has lost the drain. False if a person may have ended it."""
        made_at = effect.applied_at
        if node.is_out_of_service or not effect.is_certain or made_at is None:
            return False
        if effect.run_id in owners_of(node.reason):
            return False  # release 24.11 keeps the reason of a drain that was ended
        silence = self.services.slurm_topology().last_silence
        if silence is None or not silence.began - _UNSAVED <= made_at <= silence.ended:
            return False
        seen_at = self._seen_at.get(effect.command_id)
        return node.name not in silence.drained_after and (seen_at is None or seen_at < silence.ended)


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
