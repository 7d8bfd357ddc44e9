"""Action ``slurm.drain``.

A drain without a lease is checked every `CHECK_EVERY`: a killed slurmctld loses the changes of its last seconds.

Slurm does not show who ended a drain, and the server does not read when slurmctld started. So an interruption of
slurmrestd or the agent, within `_UNSAVED` of a drain, looks like a killed slurmctld: the drain is made again even if a
person ended it meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, cast

from msgspec import Struct
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


class _Known(Struct):
    """What this process knows of one drain."""

    asked_at: datetime
    seen_at: datetime | None = None  # last reading of the node as drained
    ended_at: datetime | None = None  # first reading since then without the drain
    ends_at: datetime | None = None  # end of the lease, if this process granted it and only it can end the drain


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
        self._known: dict[str, _Known] = {}  # by command ID

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
        if "reason" in output and not owners_of(str(output["reason"])):
            return timedelta(0)  # another's drain
        seconds = output.get("lease_seconds")
        return timedelta(seconds=seconds) if isinstance(seconds, int | float) and seconds > 0 else 3 * CHECK_EVERY

    async def renew(self, effects: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        """Renew leases, and check other drains. The result omits those that need no check."""
        until = max(until, self._clock.now() + SHORTEST_LEASE / 3)
        oldest = self._clock.now() - 2 * LONGEST_LEASE
        self._known = {name: known for name, known in self._known.items() if known.asked_at > oldest}
        out = {node.name for node in self.services.slurm_topology().nodes if node.unavailable}
        renewals = [await self._renew_one(effect, out) for effect in effects if self._clock.now() < until]
        return [renewal for renewal in renewals if renewal is not None]

    def _known_of(self, command_id: str) -> _Known:
        now = self._clock.now()
        known = self._known.setdefault(command_id, _Known(now))
        known.asked_at = now
        return known

    async def _renew_one(self, effect: LeasedEffect, out: Collection[str]) -> Renewal | None:
        """`out`: nodes that took no jobs when Slurm was last read."""
        params = SlurmDrainParams.model_validate(effect.params, context=ON_RECORD)
        name, known = effect.target.node or "", self._known_of(effect.command_id)
        if params.lease is None and not effect.again and self._needs_no_check(effect, params, known, out):
            return None
        try:
            node = await self.named(name)
            owners = owners_of(node.reason) if node.is_drained else ()
            self._note(known, node, owners, effect.run_id)
            if effect.run_id in owners:
                # A shared drain has no end if one of the runs wants none.
                if params.lease is not None and (owners == (effect.run_id,) or node.resume_after is not None):
                    await self.slurm.drain(node.name, node.reason, params.lease)
                    known.ends_at = self._clock.now() + params.lease
                else:
                    known.ends_at = None
                return Renewal(effect, name, "renewed")
            if params.lease is None and node.is_out_of_service:
                return None  # by another's drain, as the step may have found it
            is_unsaved, has_expired = self._is_unsaved(effect, node, known), self._has_expired(node, known)
            if effect.again and (is_unsaved or has_expired):
                reason = "drained again: its lease had expired, or Slurm seemed to have lost the drain"
                await self._drain(node, effect.run_id, reason, params)
                now = self._clock.now()
                known.seen_at, known.ended_at = now, None
                known.ends_at = now + params.lease if params.lease is not None else None
                return Renewal(effect, name, "renewed")
        except (ClusterUnavailable, TemporaryFailure) as error:
            return Renewal(effect, name, "unanswered", str(error))
        except ObjectMissing as error:
            return Renewal(effect, name, "lost", str(error))
        except ActionFailure as error:
            return Renewal(effect, name, "refused", str(error))
        why = f"node {node.name} is {'+'.join(sorted(node.states))} with the reason {node.reason!r}"
        lost = replace(effect, is_unsaved=True) if is_unsaved else effect
        return Renewal(lost, name, "lost", why, has_expired=is_unsaved or has_expired)

    def _note(self, known: _Known, node: SlurmNode, owners: Collection[str], run_id: str) -> None:
        now = self._clock.now()
        if node.is_drained:
            known.seen_at = now
        if run_id in owners:
            known.ended_at = None
        elif known.ended_at is None:
            known.ended_at = now
        if node.is_drained and not owners:
            known.ends_at = None  # taken over by a person, who may end it

    def _needs_no_check(
        self, effect: LeasedEffect, params: SlurmDrainParams, known: _Known, out: Collection[str]
    ) -> bool:
        if params.resume_after is not None and (
            effect.applied_at is None or self._clock.now() >= effect.applied_at + params.resume_after
        ):
            return True  # Slurm has ended it
        topology, name = self.services.slurm_topology(), effect.target.node or ""
        nodes = topology.names.called(name) or topology.names.related(name)
        is_out = bool(nodes) and nodes.issubset(out)
        made_at = effect.applied_at
        is_stored = known.seen_at is not None and (made_at is None or known.seen_at >= made_at + _UNSAVED)
        return not topology.answers or (is_out and is_stored)

    def _has_expired(self, node: SlurmNode, known: _Known) -> bool:
        """Return whether the lease has expired. False if the drain ended before, or after a restart of the server."""
        ends_at = known.ends_at
        if node.is_out_of_service or ends_at is None or self._clock.now() < ends_at:
            return False
        return known.ended_at is None or known.ended_at >= ends_at

    def _is_unsaved(self, effect: LeasedEffect, node: SlurmNode, known: _Known) -> bool:
        """Return whether slurmctld seems to have lost the drain, in an interruption before it had stored it."""
        made_at = effect.applied_at
        if node.is_out_of_service or not effect.is_certain or made_at is None:
            return False
        if effect.run_id in owners_of(node.reason):
            return False  # release 24.11 keeps the reason of a drain that was ended
        silence = self.services.slurm_topology().last_silence
        if silence is None or not silence.began - _UNSAVED <= made_at <= silence.ended:
            return False
        if node.name in silence.drained_after or (known.ended_at is not None and known.ended_at < silence.began):
            return False
        return known.seen_at is None or known.seen_at < min(silence.ended, made_at + _UNSAVED)


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
