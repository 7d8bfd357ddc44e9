"""Action ``slurm.reserve``. The reservation's name contains the run's ID."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field

from trainmedic_core.fields import Duration
from trainmedic_server.actions.base import ActionParams
from trainmedic_server.actions.slurm import GONE, node_state
from trainmedic_server.actions.slurm_watched import SlurmEffect, WatchedNodeAction
from trainmedic_server.domain import host_lists
from trainmedic_server.domain.topology import SlurmTopology
from trainmedic_server.domain.value_types import TEXT, Shape
from trainmedic_server.errors import ObjectMissing, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import ON_RECORD, Action, Call, Inverse, LeasedEffect, Renewal, Services
from trainmedic_server.ports.slurm import SlurmNode, SlurmReservation

_NAME_PREFIX = "trainmedic-"  # agents change no other reservations


class SlurmReserveParams(ActionParams):
    # A minus before a name would give the reservation to all other users.
    users: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@\\-]*$", max_length=256)], ...] = Field(
        ("root",),
        min_length=1,
        max_length=100,
        description="Users, by name or numeric ID, whose jobs may use the node.",
    )
    duration: Duration = Field(
        timedelta(days=1),
        ge=timedelta(minutes=1),
        le=timedelta(days=365),
        description="The reservation ends by itself after this time, in whole minutes.",
    )
    restore: Literal[True] | None = Field(None, description="As an undo: end this run's reservation.")


class SlurmReserve(WatchedNodeAction):
    name: ClassVar[str] = "slurm.reserve"
    summary: ClassVar[str] = (
        "Reserve the node, so that Slurm starts only jobs of the named users there, such as a test job. Running jobs "
        "continue. Undo ends the reservation. Over slurmrestd it needs Slurm 25.05."
    )
    Params: ClassVar[type[BaseModel]] = SlurmReserveParams
    outputs: ClassVar[Mapping[str, Shape]] = dict.fromkeys(
        ("node", "state", "reason", "reservation", "until", "note"), TEXT
    )

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._listed: Sequence[SlurmReservation] | None = None

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params, name = cast(SlurmReserveParams, call.params), _name_for(call.run_id)

        async def reserve() -> Mapping[str, Any]:
            node = await self.find(call)
            found = await self._reserve(name, node, params, params.duration)
            until = found.ends_at.isoformat() if found.ends_at is not None else None
            return {**node_state(await self.slurm.node(node.name)), "reservation": name, "until": until}

        async def end() -> Mapping[str, Any]:
            output = {"node": call.target.node, "reservation": name}
            found = await self._find_own(name)
            if found is not None and not await self._is_on_target(found, call):
                return {**output, "note": f"stays: another has changed it, it reserves {found.nodes}"}
            try:
                # Do this for an unlisted one too: Slurm hides reservations from users who may not use them.
                await self.slurm.end_reservation(name)
            except ObjectMissing:
                return {**output, "note": GONE}
            if await self._find_own(name) is not None:
                raise TemporaryFailure(f"Slurm has not ended the reservation {name}", output)
            return output

        return await self.retry_until_deadline(call, end if params.restore else reserve)

    async def _reserve(
        self, name: str, node: SlurmNode, params: SlurmReserveParams, lasting: timedelta
    ) -> SlurmReservation:
        found = await self._find_own(name)
        if found is None:
            await self._refuse_reserved_by_other(node)
            await self.slurm.reserve(name, node.name, params.users, lasting)
            found = await self.read_back(self._find_own(name))
        if found is None or found.nodes != node.name:
            raise TemporaryFailure(f"Slurm has not reserved node {node.name} as {name}", node_state(node))
        return found

    async def _find_own(self, name: str) -> SlurmReservation | None:
        return next((each for each in await self.slurm.reservations() if each.name == name), None)

    async def _refuse_reserved_by_other(self, node: SlurmNode) -> None:
        now = self._clock.now()
        for each in await self.slurm.reservations():
            is_active = each.starts_at is not None and each.starts_at <= now
            if not is_active or each.name.startswith(_NAME_PREFIX):
                continue
            left = f"node {node.name} was left as it is: it"
            try:
                is_included = node.name in host_lists.expand(each.nodes)
            except host_lists.UnreadableHostList as error:  # such as one of more than `host_lists.MOST_HOSTS`
                why = f"{left} may be in the reservation {each.name} of another, whose list of nodes {error}"
                raise PermanentFailure(why, node_state(node)) from error
            if is_included:
                raise PermanentFailure(f"{left} is in the reservation {each.name} of another", node_state(node))

    async def _is_on_target(self, found: SlurmReservation, call: Call) -> bool:
        try:
            return found.nodes == (await self.find(call)).name
        except ObjectMissing:
            return True  # the name is enough for a node that Slurm no longer has

    async def renew(self, effects: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        self._listed = None  # one list for all effects
        return await super().renew([each for each in effects if not _params(each).restore], until)

    async def look(self, effect: LeasedEffect) -> SlurmEffect:
        node = str(effect.output.get("node") or (await self.named(effect.target.node or "")).name)
        name = _name_for(effect.run_id)
        if self._listed is None or effect.again:
            self._listed = await self.slurm.reservations()
        found = next((each for each in self._listed if each.name == name), None)
        why = f"there is no reservation {name}" if found is None else f"{name} reserves {found.nodes}"
        return SlurmEffect(
            *(node, why, found is not None and found.nodes == node),
            is_changed=found is not None and found.nodes != node,
        )

    def stands(self, effect: LeasedEffect, name: str, topology: SlurmTopology) -> bool:
        # A node's record names only one of its reservations.
        return name in topology.unavailable and name not in topology.withheld.reserved

    def own_end(self, effect: LeasedEffect) -> timedelta:
        return _params(effect).duration

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return None if cast(SlurmReserveParams, params).restore else Inverse(cls.name, {"restore": True})


def _name_for(run_id: str) -> str:
    return f"{_NAME_PREFIX}{run_id}"


def _params(effect: LeasedEffect) -> SlurmReserveParams:
    return SlurmReserveParams.model_validate(effect.params, context=ON_RECORD)


ACTIONS: tuple[type[Action], ...] = (SlurmReserve,)
