"""Brings the driver's power limits to what the caps that stand say, and keeps them there.

Intent is in the ledger before the driver is told, the outcome after. Whatever was interrupted is finished from
there: everything here works towards the limit that the ledger says, looks at the one that the driver shows, and
sets it only where the two differ. So a command that is already in effect makes no second call.

A limit that somebody else has set is left alone, and with it end the caps that stood (see
`holds.GpuPowerState.is_somebody_elses`). One that the driver forgot is set again: while a lease runs, the server
says that the cap is needed. A GPU that does not answer keeps what is owed to it until it does.

Called in one thread, by the hands and the keeper of ``hands``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from trainmedic_server.agent.policy import PowerBounds
from trainmedic_server.agent.power.caps import LAPSED, GpuPowerState, PowerCap, clamp, is_same
from trainmedic_server.agent.power.ledger import PowerLedger
from trainmedic_server.errors import GpuError
from trainmedic_server.ports.gpus import Gpus, PowerLimits

log = logging.getLogger(__name__)


def since_boot() -> float:
    """Seconds that go on while the machine sleeps, and that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class PowerOutcome:
    """What a GPU came to: the limits before and after, and whether somebody else had set them meanwhile."""

    before: PowerLimits
    after: PowerLimits
    state: GpuPowerState
    is_overridden: bool = False
    ours_mw: int | None = None


class PowerControl:
    """The power limits of this node's GPUs."""

    def __init__(
        self,
        gpus: Gpus,
        ledger: PowerLedger,
        bounds: PowerBounds,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        boottime: Callable[[], float] = since_boot,
    ) -> None:
        self.gpus = gpus
        self.ledger = ledger
        self.bounds = bounds
        self._now = now
        self._boottime = boottime
        self._ends: dict[str, tuple[float, float]] = {}
        self._told: dict[str, str] = {}

    def now(self) -> float:
        return self._now().timestamp()

    # --- caps -----------------------------------------------------------------------------------------

    def cap(
        self, hold_id: str, asked: Callable[[PowerLimits], int], uuids: Sequence[str], lease: float
    ) -> dict[str, PowerOutcome | GpuError]:
        """Put a cap on all these GPUs; where one of them cannot be capped, none is, and its error is in the answer.

        ``asked`` gives the milliwatts for a card, or raises GpuError. A cap that stands already is only brought to
        the driver. Raises JournalUnavailable; then nothing is in force.
        """
        return self._cap(hold_id, lambda _, present: asked(present), uuids, lease, "failed: {}")

    def set_again(self, hold_id: str, until: float) -> dict[str, PowerOutcome | GpuError]:
        """A cap whose lease has run out stands again, until then, on all the GPUs that it stood on; or on none of
        them, and it has lapsed as before. What was asked for counts, by the bounds and the limits of today.

        Empty where there is no such cap: it was never here, it stands, or something else has ended it.
        """
        where = [uuid for uuid, state in self.ledger.all().items() if state.has_lapsed(hold_id)]
        asked = {uuid: hold.requested_mw for uuid in where if (hold := self.ledger.of(uuid).hold(hold_id))}
        lease = until - self.now()
        if not where or lease <= 0:
            return {}
        return self._cap(hold_id, lambda uuid, _: asked[uuid], where, lease, LAPSED)

    def _cap(
        self, hold_id: str, asked: Callable[[str, PowerLimits], int], uuids: Sequence[str], lease: float, if_not: str
    ) -> dict[str, PowerOutcome | GpuError]:
        """As `cap`; where that fails the holds have ended by `if_not`, with the error in the place of its braces."""
        before: dict[str, PowerLimits] = {}
        requested: dict[str, int] = {}
        for uuid in uuids:
            try:
                before[uuid] = self.gpus.power(uuid)
                requested[uuid] = asked(uuid, before[uuid])
            except GpuError as error:
                return self._taken_back(hold_id, uuids, uuid, error, if_not)
        granted = min(lease, self.bounds.max_lease.total_seconds())
        hold = PowerCap(hold_id, 0, self.now() + granted, granted, 0, 0)
        states = {uuid: self._with_hold(uuid, hold, requested[uuid], present) for uuid, present in before.items()}
        self.ledger.save({uuid: _intending(state, before[uuid]) for uuid, state in states.items()})
        settled = {}
        for uuid in uuids:
            try:
                settled[uuid] = self._bring(uuid, before[uuid])
            except GpuError as error:
                return {**settled, **self._taken_back(hold_id, uuids, uuid, error, if_not)}
        self.ledger.save_anyway({uuid: one.state for uuid, one in settled.items()})
        return dict(settled)

    def _with_hold(self, uuid: str, hold: PowerCap, requested_mw: int, present: PowerLimits) -> GpuPowerState:
        state = self.ledger.of(uuid)
        if state.is_somebody_elses(present):
            self._tell_overridden(uuid, state, present)
            state = state.overridden(self.now())
        if _stands(state, hold.id):
            return state
        clamped = clamp(requested_mw, present, self.bounds.floor_percent)
        hold = replace(
            hold,
            limit_mw=clamped.limit_mw,
            previous_mw=present.limit_mw,
            requested_mw=requested_mw,
            clamped=clamped.by,
        )
        return state.without(hold.id).with_hold(hold, present)

    def _taken_back(
        self, hold_id: str, uuids: Sequence[str], uuid: str, error: GpuError, by: str
    ) -> dict[str, PowerOutcome | GpuError]:
        self.end({hold_id}, by.format(error), uuids)
        return {uuid: error}

    def end(
        self, hold_ids: Collection[str], by: str, uuids: Sequence[str] | None = None
    ) -> dict[str, PowerOutcome | GpuError]:
        """End the caps of these commands, on all their GPUs or on these of them. What a GPU that does not answer is
        owed stays in the ledger, and the keeper sees to it."""
        return self.settle(self.mark_ended(hold_ids, by, uuids))

    def ended_by(self, hold_id: str) -> str | None:
        """How a command's caps have ended; None where they stand or never were."""
        holds = [state.hold(hold_id) for state in self.ledger.all().values()]
        return next((hold.ended_by for hold in holds if hold is not None and hold.ended_by is not None), None)

    def has_lapsed(self, hold_id: str) -> bool:
        """Whether a command's caps could be set again."""
        return any(state.has_lapsed(hold_id) for state in self.ledger.all().values())

    def forget(self, hold_id: str) -> None:
        """As if the caps of a command had never been, so that it can come again."""
        where = [uuid for uuid, state in self.ledger.all().items() if state.hold(hold_id) is not None]
        self.ledger.save_anyway({uuid: self.ledger.of(uuid).without(hold_id) for uuid in where})
        self.settle(where)

    def mark_ended(self, hold_ids: Collection[str], by: str, uuids: Sequence[str] | None = None) -> list[str]:
        """As `end`, in the ledger only; the GPUs that are to be settled then. Caps that have lapsed end for good,
        which changes nothing for their GPUs."""
        states = {uuid: state for uuid, state in self.ledger.all().items() if uuids is None or uuid in uuids}
        standing = [uuid for uuid, state in states.items() if any(_stands(state, one) for one in hold_ids)]
        ended = {uuid: state.ending(hold_ids, by, self.now()) for uuid, state in states.items()}
        self.ledger.save_anyway({uuid: state for uuid, state in ended.items() if state != states[uuid]})
        return standing

    def settle(self, uuids: Iterable[str]) -> dict[str, PowerOutcome | GpuError]:
        """Bring GPUs to what the ledger says. Where that fails it is still to be done, and the error is in the answer.

        The ledger is written once before and once after, however many there are: a disk that is slow to write must
        not hold the last of them up.
        """
        outcome: dict[str, PowerOutcome | GpuError] = {}
        intended: dict[str, GpuPowerState] = {}
        due: dict[str, PowerLimits] = {}
        for uuid in uuids:
            state = self.ledger.of(uuid)
            try:
                present = self.gpus.power(uuid)
            except GpuError as error:
                outcome[uuid] = error
                continue
            if state.baseline is None:
                outcome[uuid] = PowerOutcome(present, present, state)
            elif state.is_somebody_elses(present):
                self._tell_overridden(uuid, state, present)
                intended[uuid] = state.overridden(self.now())
                ours_mw = state.baseline.set_mw
                outcome[uuid] = PowerOutcome(present, present, intended[uuid], is_overridden=True, ours_mw=ours_mw)
            else:
                if present.session != state.baseline.session and not is_same(present.limit_mw, state.wanted_mw()):
                    log.warning("the driver has forgotten the power limit of %s; it is set again", uuid)
                intended[uuid] = _intending(state, present)
                due[uuid] = present
        self.ledger.save_anyway(intended)
        settled: dict[str, GpuPowerState] = {}
        for uuid, present in due.items():
            try:
                outcome[uuid] = brought = self._bring(uuid, present)
                settled[uuid] = brought.state
            except GpuError as error:
                outcome[uuid] = error
        self.ledger.save_anyway(settled)
        self._tell_errors(outcome)
        return outcome

    def _tell_errors(self, outcome: Mapping[str, PowerOutcome | GpuError]) -> None:
        """Log an error when it is another than the last."""
        for uuid, one in outcome.items():
            if isinstance(one, PowerOutcome):
                self._told.pop(uuid, None)
            elif self._told.get(uuid) != str(one):
                log.warning("the power limit of %s is not what it should be, and is tried again: %s", uuid, one)
                self._told[uuid] = str(one)

    def _bring(self, uuid: str, present: PowerLimits) -> PowerOutcome:
        """The call to the driver, if one is needed. The intent is in the ledger."""
        state = self.ledger.of(uuid)
        wanted = state.wanted_mw()
        assert wanted is not None
        after = present
        if not is_same(present.limit_mw, wanted):
            self.gpus.set_power_limit(uuid, wanted)
            after = self.gpus.power(uuid)
            log.info("the power limit of %s: %d mW, was %d mW", uuid, after.limit_mw, present.limit_mw)
        return PowerOutcome(present, after, state.settled(after))

    def _tell_overridden(self, uuid: str, state: GpuPowerState, present: PowerLimits) -> None:
        assert state.baseline is not None
        log.warning(
            "somebody else has set the power limit of %s to %d mW (this agent: %d mW); it is left, and the caps end",
            uuid,
            present.limit_mw,
            state.baseline.set_mw,
        )

    # --- leases ---------------------------------------------------------------------------------------

    def renew(self, hold_ids: Sequence[str], until: float) -> set[str]:
        """Those of the caps that stand, now until then or longer. None ends sooner than it would have."""
        until = min(until, self.now() + self.bounds.max_lease.total_seconds())
        states = self.ledger.all()
        where = {uuid: state for uuid, state in states.items() if any(_stands(state, one) for one in hold_ids)}
        for hold_id in hold_ids:
            where = {uuid: state.renewed(hold_id, until) for uuid, state in where.items()}
        self.ledger.save(where)
        wanted = set(hold_ids)
        standing = [hold for state in where.values() for hold in state.standing if hold.id in wanted]
        return {hold.id for hold in standing if self.remaining(hold) > 0}

    def remaining(self, hold: PowerCap | None) -> float:
        """Seconds that its lease has left. By the clock, and by time since boot: a clock that is set back does not
        make a lease longer, and one set back while the agent was away makes it no longer than the policy allows."""
        if hold is None:
            return 0.0
        by_clock = hold.lease_until - self.now()
        until, end = self._ends.get(hold.id, (0.0, 0.0))
        if until != hold.lease_until:
            end = self._boottime() + min(by_clock, self.bounds.max_lease.total_seconds())
            self._ends[hold.id] = (hold.lease_until, end)
        return min(by_clock, end - self._boottime())

    def overdue(self) -> list[str]:
        """The commands whose caps have outlived their lease."""
        standing = {hold.id: hold for state in self.ledger.all().values() for hold in state.standing}
        self._ends = {hold_id: end for hold_id, end in self._ends.items() if hold_id in standing}
        return [hold_id for hold_id, hold in standing.items() if self.remaining(hold) <= 0]

    def next_end(self) -> float | None:
        """Seconds until the first lease ends."""
        left = [self.remaining(hold) for state in self.ledger.all().values() for hold in state.standing]
        return min(left, default=None)


def _stands(state: GpuPowerState, hold_id: str) -> bool:
    return any(hold.id == hold_id for hold in state.standing)


def _intending(state: GpuPowerState, present: PowerLimits) -> GpuPowerState:
    return state if is_same(present.limit_mw, state.wanted_mw()) else state.about_to_set(present)
