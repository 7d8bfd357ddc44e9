"""Replies to power commands, in watts for display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from trainmedic.wire import envelope
from trainmedic_agent.errors import (
    CommandFailed,
    CommandNotExecuted,
    CommandRejected,
    CommandUnsupported,
    GpuAbsent,
    GpuError,
    NoPermission,
    NotSupported,
)
from trainmedic_agent.ports.gpus import PowerLimits, in_watts
from trainmedic_agent.power.caps import EXPIRED
from trainmedic_agent.power.control import Outcomes, PowerOutcome


def describe_caps(cap_id: str, outcomes: Mapping[str, PowerOutcome | GpuError]) -> list[dict[str, Any]]:
    return [
        _describe_cap(uuid, cap_id, outcome) for uuid, outcome in outcomes.items() if isinstance(outcome, PowerOutcome)
    ]


def describe_restored(outcomes: Mapping[str, PowerOutcome | GpuError]) -> list[dict[str, Any]]:
    return [
        _describe_restored(uuid, outcome) for uuid, outcome in outcomes.items() if isinstance(outcome, PowerOutcome)
    ]


def one_or_all(descriptions: list[dict[str, Any]], has_list: bool) -> dict[str, Any]:
    """Return the only description, or with `has_list` all under ``gpus``."""
    if not has_list:
        (only,) = descriptions
        return only
    return {"gpus": descriptions}


def errors_of(outcomes: Outcomes) -> dict[str, GpuError]:
    return {uuid: outcome for uuid, outcome in outcomes.items() if isinstance(outcome, GpuError)}


def refusal_of(errors: Mapping[str, GpuError], gpu_count: int, unrestored: Sequence[str] = ()) -> CommandNotExecuted:
    """`unrestored`: GPUs whose limit may have been changed."""
    reason = "; ".join(str(error) for error in errors.values())
    if unrestored:
        reason = f"{', '.join(unrestored)} may have been capped, and the agent keeps restoring: {reason}"
    elif gpu_count > 1:
        reason = f"none of the {gpu_count} GPUs is capped: {reason}"
    output = {"gpus": {name: str(error) for name, error in errors.items()}}
    if unrestored:
        return CommandFailed(reason, {**output, "may_be_done": True})
    if any(isinstance(error, NotSupported | NoPermission) for error in errors.values()):
        return CommandUnsupported(reason, output)
    if any(isinstance(error, GpuAbsent) for error in errors.values()):
        return CommandRejected(reason, output)
    return CommandFailed(reason, output)


def end_reason(ended_by: str) -> str:
    if ended_by.startswith("undo"):
        return "it was reverted before"
    reasons = {EXPIRED: "its lease had run out", "overridden": "another process had changed the limit"}
    return reasons.get(ended_by, ended_by)


def _describe_cap(uuid: str, cap_id: str, outcome: PowerOutcome) -> dict[str, Any]:
    cap = outcome.state.cap(cap_id)
    assert cap is not None
    after = outcome.after
    description = {
        "gpu": uuid,
        "requested_watts": in_watts(cap.requested_mw),
        "limit_watts": in_watts(after.enforced_mw),
        "previous_watts": in_watts(cap.previous_mw),
        **_card(after),
        "lease_seconds": cap.lease_seconds,
        "lease_until": envelope.write_time(datetime.fromtimestamp(cap.lease_until, UTC)),
    }
    if cap.clamped is not None:
        description["clamped"] = cap.clamped
    note = _cap_note(cap.limit_mw, after)
    return {**description, "note": note} if note else description


def _card(limits: PowerLimits) -> dict[str, Any]:
    values = {
        "default_watts": limits.default_mw,
        "min_watts": limits.min_mw,
        "max_watts": limits.max_mw,
        "draw_watts": limits.draw_mw,
    }
    return {name: in_watts(value) for name, value in values.items() if value is not None}


def _cap_note(limit_mw: int, after: PowerLimits) -> str | None:
    # Drivers round, so differences below 1 W do not count.
    if after.enforced_mw + 1000 <= limit_mw:
        return f"a lower limit of {in_watts(after.enforced_mw):g} W is already active, and a cap never raises it"
    if after.enforced_mw >= limit_mw + 1000:
        return f"the driver enforces {in_watts(after.enforced_mw):g} W, not the {in_watts(limit_mw):g} W that were set"
    if after.draw_mw is not None and after.draw_mw < after.enforced_mw - 1000:
        return f"the GPU draws {in_watts(after.draw_mw):g} W, less than this limit, so the cap has no effect now"
    return None


def _describe_restored(uuid: str, outcome: PowerOutcome) -> dict[str, Any]:
    description = {
        "gpu": uuid,
        "limit_watts": in_watts(outcome.after.enforced_mw),
        "previous_watts": in_watts(outcome.before.enforced_mw),
        **_card(outcome.after),
    }
    if outcome.set_by_agent_mw is not None:
        description["note"] = (
            f"the limit is left at {in_watts(outcome.after.limit_mw):g} W: another process set it after this agent "
            f"set {in_watts(outcome.set_by_agent_mw):g} W"
        )
    elif outcome.state.active:
        description["note"] = f"{len(outcome.state.active)} other cap(s) on this GPU are still active"
    return description
