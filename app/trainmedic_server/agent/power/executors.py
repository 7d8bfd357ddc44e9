"""The actions ``gpu.power_limit`` and ``gpu.renew_lease``, and the keeper that ends caps whose lease is over.

What a command asks is checked here and told back; what happens to the GPUs is ``control``'s. All three run in
the lane ``gpu``, one at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trainmedic.wire import envelope
from trainmedic_server.agent import executors
from trainmedic_server.agent.power.caps import LAPSED
from trainmedic_server.agent.power.control import PowerControl, PowerOutcome
from trainmedic_server.errors import (
    CommandFailed,
    CommandNotExecuted,
    CommandRejected,
    CommandUnsupported,
    GpuAbsent,
    GpuError,
    NoPermission,
    NotSupported,
)
from trainmedic_server.ports.gpus import PowerLimits, in_watts

log = logging.getLogger(__name__)

LANE = "gpu"
DEFAULT_LEASE = 300.0
"""Seconds that a cap stands where its command does not say."""
_KNOWN = ("watts", "percent", "restore", "lease_seconds")
MOST_GPUS = 64
"""Of one command."""


@dataclass(frozen=True, slots=True)
class PowerLimitExecutor:
    """``gpu.power_limit``: a cap in watts or percent of the card's default, on one GPU or on several alike."""

    control: PowerControl
    action: str = "gpu.power_limit"
    queue: str = LANE

    def perform(self, order: executors.AcceptedCommand) -> Mapping[str, Any]:
        command = order.command
        if command.undo_of is not None:
            return self._undo(command)
        unknown = [name for name in command.params if name not in _KNOWN]
        if unknown:
            raise CommandRejected(f"{self.action} does not know {_listed(unknown)}; it takes {_listed(_KNOWN)}")
        asked = _asked(command.params)
        lease = _seconds(command.params, "lease_seconds", DEFAULT_LEASE)
        uuids = self._uuids(command.target)
        if asked is None:
            return self._restore(command.id, uuids)
        before = self.control.ended_by(command.id)
        if before is not None:
            raise CommandFailed(
                f"the cap was begun before the agent was restarted, and it has ended since: {_told(before)}"
            )
        outcome = self.control.cap(command.id, asked, uuids, lease)
        errors = {uuid: one for uuid, one in outcome.items() if isinstance(one, GpuError)}
        if errors:
            raise _refusal(errors, len(uuids))
        return _one_or_all(_capped(command.id, outcome), "gpus" in command.target)

    def abandon(self, order: executors.AcceptedCommand) -> None:
        """A cap that was begun and has expired since does not stay; its command may come again."""
        self.control.forget(order.command.id)

    # --- caps -----------------------------------------------------------------------------------------

    def _uuids(self, target: Mapping[str, Any]) -> list[str]:
        """The GPUs that the target names, as this node's driver knows them."""
        named = target["gpus"] if "gpus" in target else [target.get("gpu")]
        if not isinstance(named, list) or not named or not all(isinstance(one, str) and one.strip() for one in named):
            raise CommandRejected(
                "the target names no GPU: gpu must be a UUID, a PCI address or an index, or gpus a list of them"
            )
        if len(named) > MOST_GPUS:
            raise CommandRejected(f"the target names {len(named)} GPUs; a command may name {MOST_GPUS}")
        found: dict[str, None] = {}
        errors: dict[str, GpuError] = {}
        for name in named:
            try:
                found[self.control.gpus.find(name).uuid] = None
            except GpuError as error:
                errors[name] = error
        if errors:
            raise _refusal(errors, len(named))
        return list(found)

    # --- giving back ------------------------------------------------------------------------------------

    def _undo(self, command: envelope.Command) -> Mapping[str, Any]:
        assert command.undo_of is not None
        by = f"undo {command.id}"
        ended = self.control.ended_by(command.undo_of)
        outcome = self.control.end({command.undo_of}, by)
        holds = {uuid: state.hold(command.undo_of) for uuid, state in self.control.ledger.all().items()}
        # Begun before the agent was restarted:
        begun = [uuid for uuid, hold in holds.items() if uuid not in outcome and hold and hold.ended_by == by]
        if outcome or (begun and ended == by):
            return self._given_back(outcome | self.control.settle(begun))
        return {**executors.NOTHING_TO_UNDO, "note": _told(ended) if ended else "no such cap stands here"}

    def _restore(self, command_id: str, uuids: Sequence[str]) -> Mapping[str, Any]:
        """End every cap on these GPUs, whoever made it."""
        by = f"undo {command_id}"
        self.control.mark_ended({hold.id for uuid in uuids for hold in self.control.ledger.of(uuid).holds}, by, uuids)
        return self._given_back(self.control.settle(uuids))

    def _given_back(self, outcome: Mapping[str, PowerOutcome | GpuError]) -> Mapping[str, Any]:
        errors = {uuid: one for uuid, one in outcome.items() if isinstance(one, GpuError)}
        if errors:
            reason = "; ".join(f"{uuid}: {error}" for uuid, error in errors.items())
            raise CommandFailed(f"not given back yet: {reason}. The agent goes on trying", {"owed": sorted(errors)})
        told = {uuid: _returned(uuid, one) for uuid, one in outcome.items() if isinstance(one, PowerOutcome)}
        return _one_or_all(told, len(told) > 1)


@dataclass(frozen=True, slots=True)
class RenewLeaseExecutor:
    """``gpu.renew_lease``: these caps are still needed, for so many seconds from when that was said; those under
    ``again`` also where their leases have run out meanwhile."""

    control: PowerControl
    action: str = "gpu.renew_lease"
    queue: str = LANE

    def perform(self, order: executors.AcceptedCommand) -> Mapping[str, Any]:
        command = order.command
        holds, again = _ids(command.params, "holds"), _ids(command.params, "again", [])
        until = command.issued_at.timestamp() + _seconds(command.params, "lease_seconds", DEFAULT_LEASE)
        renewed = self.control.renew(holds, until)
        outcomes = {one: self.control.set_again(one, until) for one in holds if one in again and one not in renewed}
        failed = {one: why for one, outcome in outcomes.items() if (why := _why_not(outcome))}
        renewed |= {one for one, outcome in outcomes.items() if outcome and one not in failed}
        unknown = [one for one in holds if one not in renewed]
        ended = {one: _told(by) for one in unknown if (by := self.control.ended_by(one)) is not None}
        told = {
            "ended": {one: f"{why}{failed.get(one, '')}" for one, why in ended.items()},
            "lapsed": [one for one in unknown if self.control.has_lapsed(one)],
            "again": {one: list(_capped(one, outcome).values()) for one, outcome in outcomes.items() if one in renewed},
        }
        more = {name: value for name, value in told.items() if value}
        return {"renewed": [one for one in holds if one in renewed], "unknown": unknown, **more}


class LeaseExpiry:
    """Ends caps whose lease is over, gives back what a GPU is owed, and looks after the limits that are in force.

    Due at once when the agent starts, so that nothing that ran out meanwhile outlives the start.
    """

    VERIFY = 30.0
    """Seconds between two looks at whether the limits are still what was set."""
    AGAIN = (1.0, 2.0, 5.0, 10.0, 30.0)
    """Seconds after which a GPU that did not answer is tried again."""

    def __init__(self, control: PowerControl, boottime: Callable[[], float]) -> None:
        self._control = control
        self._boottime = boottime
        self._verify_at = -math.inf
        self._attempts: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}

    @property
    def queue(self) -> str:
        return LANE

    def due(self) -> float | None:
        states = self._control.ledger.all()
        if not any(state.baseline is not None for state in states.values()):
            return None
        now = self._boottime()
        owed = [self._retry_at.get(uuid, now) - now for uuid, state in states.items() if state.is_owed]
        ends = self._control.next_end()
        return min([self._verify_at - now, *owed, *([] if ends is None else [ends])])

    def run(self) -> None:
        overdue = self._control.overdue()
        for hold_id in overdue:
            log.warning("the lease of the power cap %s is over and was not renewed; the cap ends", hold_id)
        self._noted(self._control.end(overdue, LAPSED))
        now = self._boottime()
        verifies = now >= self._verify_at
        if verifies:
            self._verify_at = now + self.VERIFY
        self._noted(
            self._control.settle(
                uuid
                for uuid, state in self._control.ledger.all().items()
                if (verifies and state.baseline is not None) or (state.is_owed and now >= self._retry_at.get(uuid, now))
            )
        )

    def _noted(self, outcome: Mapping[str, PowerOutcome | GpuError]) -> None:
        for uuid, one in outcome.items():
            if isinstance(one, GpuError):
                attempt = self._attempts.get(uuid, 0)
                self._attempts[uuid] = attempt + 1
                self._retry_at[uuid] = self._boottime() + self.AGAIN[min(attempt, len(self.AGAIN) - 1)]
            else:
                self._attempts.pop(uuid, None)
                self._retry_at.pop(uuid, None)


# --- what a command asks -------------------------------------------------------------------------------


def _asked(params: Mapping[str, Any]) -> Callable[[PowerLimits], int] | None:
    """The milliwatts that a command wants of a card; None where it wants the caps to end. Raises Rejected."""
    given = [name for name in ("watts", "percent", "restore") if params.get(name) is not None]
    if len(given) != 1:
        raise CommandRejected("give exactly one of watts and percent")
    if given == ["restore"]:
        if params["restore"] is not True:
            raise CommandRejected("restore can only be true")
        return None
    value = _seconds(params, given[0], 0.0)
    if given == ["watts"]:
        return lambda _: round(value * 1000)
    if value > 100:
        raise CommandRejected(f"percent is of the card's default limit, and at most 100, not {value:g}")

    def share(limits: PowerLimits) -> int:
        if limits.default_mw is None:
            raise NotSupported(
                "the card does not tell its default limit, so a percentage of it means nothing: give watts"
            )
        return round(limits.default_mw * value / 100)

    return share


def _listed(names: Sequence[object]) -> str:
    return ", ".join(repr(name)[:130] for name in names[:20])


def _ids(params: Mapping[str, Any], name: str, default: Sequence[str] | None = None) -> Sequence[str]:
    value = params.get(name, default)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise CommandRejected(f"{name} must be a list of command ids")
    return value


def _seconds(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise CommandRejected(f"{name} must be a number over 0, not {value!r}")
    return float(value)


# --- what a command is told -------------------------------------------------------------------------------


def _capped(hold_id: str, outcome: Mapping[str, PowerOutcome | GpuError]) -> dict[str, dict[str, Any]]:
    """By UUID, of a cap that stands on each of these GPUs."""
    return {uuid: _cap(uuid, hold_id, one) for uuid, one in outcome.items() if isinstance(one, PowerOutcome)}


def _cap(uuid: str, hold_id: str, settled: PowerOutcome) -> dict[str, Any]:
    hold = settled.state.hold(hold_id)
    assert hold is not None
    after = settled.after
    told = {
        "gpu": uuid,
        "requested_watts": in_watts(hold.requested_mw),
        "limit_watts": in_watts(after.enforced_mw),
        "previous_watts": in_watts(hold.previous_mw),
        **_card(after),
        "lease_seconds": hold.lease_seconds,
        "lease_until": _time(hold.lease_until),
    }
    if hold.clamped is not None:
        told["clamped"] = hold.clamped
    note = _note(hold.limit_mw, after)
    return {**told, "note": note} if note else told


def _card(limits: PowerLimits) -> dict[str, Any]:
    values = {
        "default_watts": limits.default_mw,
        "min_watts": limits.min_mw,
        "max_watts": limits.max_mw,
        "draw_watts": limits.draw_mw,
    }
    return {name: in_watts(value) for name, value in values.items() if value is not None}


def _note(limit_mw: int, after: PowerLimits) -> str | None:
    if after.enforced_mw + 1000 <= limit_mw:
        return f"a lower limit of {in_watts(after.enforced_mw):g} W is in force already, and a cap never raises one"
    if after.enforced_mw >= limit_mw + 1000:
        return f"the driver enforces {in_watts(after.enforced_mw):g} W, not the {in_watts(limit_mw):g} W that were set"
    if after.draw_mw is not None and after.draw_mw < after.enforced_mw - 1000:
        return f"the GPU draws {in_watts(after.draw_mw):g} W, less than this limit, so for now it cools nothing"
    return None


def _why_not(outcome: Mapping[str, PowerOutcome | GpuError]) -> str:
    errors = [str(one) for one in outcome.values() if isinstance(one, GpuError)]
    return f", and it could not be set again: {'; '.join(errors)}" if errors else ""


def _returned(uuid: str, settled: PowerOutcome) -> dict[str, Any]:
    told = {
        "gpu": uuid,
        "limit_watts": in_watts(settled.after.enforced_mw),
        "previous_watts": in_watts(settled.before.enforced_mw),
        **_card(settled.after),
    }
    if settled.is_overridden and settled.ours_mw is not None:
        told["note"] = (
            f"the limit is left at {in_watts(settled.after.limit_mw):g} W: somebody else has set that since this agent "
            f"set {in_watts(settled.ours_mw):g} W"
        )
    elif settled.state.standing:
        told["note"] = f"{len(settled.state.standing)} other cap(s) on this GPU still stand"
    return told


def _one_or_all(told: Mapping[str, dict[str, Any]], several: bool) -> dict[str, Any]:
    if not several:
        (only,) = told.values()
        return only
    return {"gpus": list(told.values())}


def _refusal(errors: Mapping[str, GpuError], of: int) -> CommandNotExecuted:
    reason = "; ".join(str(error) for error in errors.values())
    if of > 1:
        reason = f"none of the {of} GPUs is capped: {reason}"
    output = {"gpus": {name: str(error) for name, error in errors.items()}}
    if any(isinstance(error, NotSupported | NoPermission) for error in errors.values()):
        return CommandUnsupported(reason, output)
    if any(isinstance(error, GpuAbsent) for error in errors.values()):
        return CommandRejected(reason, output)
    return CommandFailed(reason, output)


def _told(ended_by: str) -> str:
    """Why a cap has ended, for people."""
    if ended_by.startswith("undo"):
        return "it was given back before"
    reasons = {LAPSED: "its lease had run out", "overridden": "somebody else had set the limit since"}
    return reasons.get(ended_by, ended_by)


def _time(at: float) -> str:
    return envelope.write_time(datetime.fromtimestamp(at, UTC))
