"""Application of the active caps to the driver. Not thread-safe.

The ledger records the intent before a driver call and the outcome afterwards. A limit that another process has set
stays, and the active caps end. A limit that the driver forgot is set again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire.steady_time import since_boot, utc_now
from trainmedic_agent.errors import GpuError
from trainmedic_agent.policy import PowerBounds
from trainmedic_agent.ports.gpus import Gpus, PowerLimits
from trainmedic_agent.power.caps import EXPIRED, GpuPowerState, LeaseEnd, PowerCap, clamp, is_same
from trainmedic_agent.power.ledger import PowerLedger

log = logging.getLogger(__name__)


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


class PowerOutcome(Struct, frozen=True):
    """Result of setting or restoring a GPU's limit.

    - ``before``, ``after``: the driver's limits
    - ``set_by_agent_mw``: the agent's last limit, if another process has changed it
    """

    before: PowerLimits
    after: PowerLimits
    state: GpuPowerState
    set_by_agent_mw: int | None = None

    @property
    def is_overridden(self) -> bool:
        return self.set_by_agent_mw is not None


Outcomes = dict[str, PowerOutcome | GpuError]
"""Outcome or error by GPU UUID."""


# All callers run in the thread of the agent's queue ``gpu``; `wiring.stopped_agent` uses it without a running agent.
class PowerControl:
    """`boottime` returns seconds since the boot `boot`."""

    def __init__(
        self,
        gpus: Gpus,
        ledger: PowerLedger,
        bounds: PowerBounds,
        now: Callable[[], datetime] = utc_now,
        boottime: Callable[[], float] = since_boot,
        boot: str | None = None,
    ) -> None:
        self.gpus = gpus
        self.ledger = ledger
        self.bounds = bounds
        self._now = now
        self._boottime = boottime
        self._boot = boot_id() if boot is None else boot
        # By cap of an earlier boot: the end of its lease in seconds since this boot (see `_remaining`).
        self._ends: dict[str, float] = {}
        self._logged_errors: dict[str, str] = {}

    # --- caps ---

    def cap(self, cap_id: str, requested: Callable[[PowerLimits], int], uuids: Sequence[str], lease: float) -> Outcomes:
        """Cap all these GPUs, or none if one fails; the outcomes then have its error.

        ``requested`` returns a card's milliwatts, or raises GpuError. Raises JournalUnavailable, with no cap active.
        """
        return self._cap(cap_id, lambda _, present: requested(present), uuids, lease, "failed: {}")

    def set_again(self, cap_id: str, until: float) -> Outcomes:
        """Reapply an expired cap on all its GPUs, or on none if one fails.

        The limit follows from the original request and the current bounds. Raises JournalUnavailable.
        """
        uuids = [uuid for uuid, state in self.ledger.all().items() if state.has_expired(cap_id)]
        requested = {uuid: cap.requested_mw for uuid in uuids if (cap := self.ledger.of(uuid).cap(cap_id))}
        lease = until - self._unix_now()  # `until` is a Unix time
        if not uuids or lease <= 0:
            return {}
        return self._cap(cap_id, lambda uuid, _: requested[uuid], uuids, lease, EXPIRED)

    def _cap(
        self,
        cap_id: str,
        requested: Callable[[str, PowerLimits], int],
        uuids: Sequence[str],
        lease: float,
        failed_by: str,  # `PowerCap.ended_by` after a failure; {} stands for the error
    ) -> Outcomes:
        before: dict[str, PowerLimits] = {}
        requested_mw: dict[str, int] = {}
        for uuid in uuids:
            try:
                before[uuid] = self.gpus.power(uuid)
                requested_mw[uuid] = requested(uuid, before[uuid])
            except GpuError as error:
                self.end({cap_id}, failed_by.format(error), uuids)
                return {uuid: error}
        granted = min(lease, self.bounds.max_lease.total_seconds())
        # All GPUs share one lease end, because `_ends` is by cap; each card has its own limit.
        end = self._end_in(granted)
        cap = PowerCap(cap_id, 0, end.unix, granted, 0, 0, boot=end.boot, ends_at=end.since_boot)
        states = {uuid: self._with_cap(uuid, cap, requested_mw[uuid], present) for uuid, present in before.items()}
        self.ledger.save({uuid: state.about_to_set(before[uuid]) for uuid, state in states.items()})
        outcomes: dict[str, PowerOutcome] = {}
        for uuid in uuids:
            try:
                outcomes[uuid] = self._set_limit(uuid, before[uuid])
            except GpuError as error:
                self.end({cap_id}, failed_by.format(error), uuids)
                return {**outcomes, uuid: error}
        self.ledger.save_best_effort({uuid: outcome.state for uuid, outcome in outcomes.items()})
        return dict(outcomes)

    def _with_cap(self, uuid: str, cap: PowerCap, requested_mw: int, present: PowerLimits) -> GpuPowerState:
        state = self.ledger.of(uuid)
        if state.is_overridden(present):
            self._log_override(uuid, state, present)
            state = state.overridden(self._unix_now())
        if state.has_active({cap.id}):
            return state
        clamped = clamp(requested_mw, present, self.bounds.floor_percent)
        cap = replace(
            cap,
            limit_mw=clamped.limit_mw,
            previous_mw=present.limit_mw,
            requested_mw=requested_mw,
            clamped=clamped.by,
        )
        return state.with_cap(cap, present)

    def end(self, cap_ids: Collection[str], by: str, uuids: Sequence[str] | None = None) -> Outcomes:
        """End these commands' caps on all their GPUs or only `uuids`. `by`: see `PowerCap.ended_by`."""
        return self.reconcile(self.record_ended(cap_ids, by, uuids))

    def ended_by(self, cap_id: str) -> str | None:
        caps = [state.cap(cap_id) for state in self.ledger.all().values()]
        return next((cap.ended_by for cap in caps if cap is not None and cap.ended_by is not None), None)

    def has_expired(self, cap_id: str) -> bool:
        return any(state.has_expired(cap_id) for state in self.ledger.all().values())

    def forget(self, cap_id: str) -> None:
        """Remove a command's caps as if never set, so that it can be sent again."""
        uuids = [uuid for uuid, state in self.ledger.all().items() if state.cap(cap_id) is not None]
        self.ledger.save_best_effort({uuid: self.ledger.of(uuid).without(cap_id) for uuid in uuids})
        self.reconcile(uuids)

    def record_ended(self, cap_ids: Collection[str], by: str, uuids: Sequence[str] | None = None) -> list[str]:
        """Like `end`, but only in the ledger; return the GPUs to reconcile."""
        states = {uuid: state for uuid, state in self.ledger.all().items() if uuids is None or uuid in uuids}
        ended = {uuid: state.ending(cap_ids, by, self._unix_now()) for uuid, state in states.items()}
        self.ledger.save_best_effort({uuid: state for uuid, state in ended.items() if state != states[uuid]})
        return [uuid for uuid, state in states.items() if state.has_active(cap_ids)]

    # --- driver ---

    def reconcile(self, uuids: Iterable[str]) -> Outcomes:
        """Apply the ledger's limits. Failures are returned. The ledger is written only twice: the disk may be slow."""
        outcomes: Outcomes = {}
        intended: dict[str, GpuPowerState] = {}
        due: dict[str, PowerLimits] = {}
        for uuid in uuids:
            state = self.ledger.of(uuid)
            try:
                present = self.gpus.power(uuid)
            except GpuError as error:
                outcomes[uuid] = error
                continue
            if state.baseline is None:
                outcomes[uuid] = PowerOutcome(present, present, state)
            elif state.is_overridden(present):
                self._log_override(uuid, state, present)
                intended[uuid] = state.overridden(self._unix_now())
                outcomes[uuid] = PowerOutcome(present, present, intended[uuid], state.baseline.set_mw)
            else:
                if present.session != state.baseline.session and not is_same(present.limit_mw, state.desired_mw()):
                    log.warning("driver lost a power limit; setting it again", extra={"gpu": uuid})
                intended[uuid] = state.about_to_set(present)
                due[uuid] = present
        self.ledger.save_best_effort(intended)
        confirmed: dict[str, GpuPowerState] = {}
        for uuid, present in due.items():
            try:
                outcomes[uuid] = outcome = self._set_limit(uuid, present)
                confirmed[uuid] = outcome.state
            except GpuError as error:
                outcomes[uuid] = error
        self.ledger.save_best_effort(confirmed)
        self._log_errors(outcomes)
        return outcomes

    def _set_limit(self, uuid: str, present: PowerLimits) -> PowerOutcome:
        state = self.ledger.of(uuid)
        target = state.desired_mw()
        assert target is not None
        after = present
        if not is_same(present.limit_mw, target):
            self.gpus.set_power_limit(uuid, target)
            after = self.gpus.power(uuid)
            fields = {"gpu": uuid, "milliwatts": after.limit_mw, "before": present.limit_mw}
            log.info("power limit set", extra=fields)
        return PowerOutcome(present, after, state.confirmed(after))

    def _log_errors(self, outcomes: Mapping[str, PowerOutcome | GpuError]) -> None:
        for uuid, outcome in outcomes.items():
            if isinstance(outcome, PowerOutcome):
                self._logged_errors.pop(uuid, None)
            elif self._logged_errors.get(uuid) != str(outcome):
                fields = {"gpu": uuid, "reason": str(outcome)}
                log.warning("cannot set power limit; retrying", extra=fields)
                self._logged_errors[uuid] = str(outcome)

    def _log_override(self, uuid: str, state: GpuPowerState, present: PowerLimits) -> None:
        assert state.baseline is not None
        fields = {"gpu": uuid, "milliwatts": present.limit_mw, "set_by_agent": state.baseline.set_mw}
        log.warning("power limit changed externally; keeping it and ending caps", extra=fields)

    # --- leases ---

    def renew(self, cap_ids: Collection[str], until: float) -> set[str]:
        """Extend leases to the Unix time `until`, never shorten them; return the IDs of caps in force.

        Raises JournalUnavailable.
        """
        lease = min(until - self._unix_now(), self.bounds.max_lease.total_seconds())
        active = {cap.id: cap for state in self.ledger.all().values() for cap in state.active if cap.id in cap_ids}
        end = self._end_in(lease)
        longer = {cap_id: end for cap_id, cap in active.items() if self._remaining(cap) < lease}
        states = self.ledger.all().items()
        self.ledger.save({uuid: state.renewed(longer) for uuid, state in states if state.has_active(longer)})
        return {cap_id for cap_id, cap in active.items() if cap_id in longer or self._remaining(cap) > 0}

    def overdue(self) -> list[str]:
        """Return the IDs of active caps whose leases have ended."""
        active = {cap.id: cap for state in self.ledger.all().values() for cap in state.active}
        self._ends = {cap_id: end for cap_id, end in self._ends.items() if cap_id in active}
        return [cap_id for cap_id, cap in active.items() if self._remaining(cap) <= 0]

    def next_end(self) -> float | None:
        """Return the seconds until the first lease ends; None without a cap."""
        remaining = [self._remaining(cap) for state in self.ledger.all().values() for cap in state.active]
        return min(remaining, default=None)

    def _remaining(self, cap: PowerCap) -> float:
        """Return a lease's remaining seconds, in time since boot, which no user can set.

        After a reboot the wall clock must do, bounded by the policy's maximum.
        """
        if self._boot and cap.boot == self._boot:
            return cap.ends_at - self._boottime()
        if cap.id not in self._ends:
            by_clock = cap.lease_until - self._unix_now()
            self._ends[cap.id] = self._boottime() + min(by_clock, self.bounds.max_lease.total_seconds())
        return self._ends[cap.id] - self._boottime()

    def _end_in(self, seconds: float) -> LeaseEnd:
        return LeaseEnd(self._unix_now() + seconds, self._boot, self._boottime() + seconds)

    def _unix_now(self) -> float:
        return self._now().timestamp()
