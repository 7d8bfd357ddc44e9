"""Combined outcome of one attempt at several destinations, with derived command IDs."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainmedic_core.target import Target
from trainmedic_server.domain.run import StepState
from trainmedic_server.errors import (
    ActionFailure,
    EffectDisproved,
    NoLongerWanted,
    NotSetUp,
    OutcomeUnknown,
    PermanentFailure,
    TemporaryFailure,
)

BY_JOB = "by_job"  # output member with each job's output
_SHOWN = 4
# marks members without a common value
_DIFFERS: Any = object()
# failures with a special meaning, if all destinations have it
_KEPT_IF_UNANIMOUS = (NotSetUp, NoLongerWanted, EffectDisproved)


class DestinationOutcome(Struct, frozen=True):
    destination: Target
    output: Mapping[str, Any]
    failure: ActionFailure | None = None


def derived_id(command_id: str, *parts: str) -> str:
    """Return a UUIDv7 with the time of `command_id` and a hash of all arguments."""
    digest = hashlib.sha256("\0".join((command_id, *parts)).encode()).digest()
    moment = uuid.UUID(command_id).int >> 80
    value = moment << 80 | int.from_bytes(digest[:10], "big")
    # Version and variant of a UUIDv7 (RFC 9562, section 5.7).
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def command_id_for(command_id: str, destination: Target) -> str:
    return derived_id(command_id, destination.node or "", destination.gpu or "")


def command_id_of(attempt_id: str, step: StepState, target: Target) -> str:
    """Return the attempt's ID; for a step on the run's further targets, a derived one for each."""
    return attempt_id if step.target is None else derived_id(attempt_id, target.key)


def output_of(step: StepState, target: Target) -> Mapping[str, Any]:
    """Return the step's output for this target."""
    if step.target is None:
        return step.output
    by_job = step.output.get(BY_JOB)
    output = by_job.get(target.job) if isinstance(by_job, Mapping) else None
    return output if isinstance(output, Mapping) else {}


def combine(outcomes: Sequence[DestinationOutcome], output: Mapping[str, Any], *, is_undo: bool) -> Mapping[str, Any]:
    """Return `output`, or raise one failure unless every destination succeeded.

    A partly applied action raises OutcomeUnknown; an undo can be retried if one failure is temporary.
    """
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    if not failures:
        return output
    message = "; ".join(str(failure) for failure in failures[:_SHOWN])
    if len(failures) > _SHOWN:
        message += f"; and {len(failures) - _SHOWN} more"
    applied = len(outcomes) - len(failures)
    if applied:
        message = f"applied in {applied} of {len(outcomes)} places, but {message}"
    is_unanimous = not applied and len(set(map(type, failures))) == 1
    if is_unanimous and isinstance(failures[0], _KEPT_IF_UNANIMOUS):
        raise type(failures[0])(message, output)
    is_in_part = applied or any(failure.is_begun for failure in failures)
    if any(isinstance(failure, OutcomeUnknown) for failure in failures) or (is_in_part and not is_undo):
        raise OutcomeUnknown(message, output)
    refused = [failure for failure in failures if isinstance(failure, PermanentFailure)]
    if refused and (not is_undo or len(refused) == len(failures)):
        raise PermanentFailure(message, output)
    raise TemporaryFailure(message, output)


def merged_output(outcomes: Sequence[DestinationOutcome]) -> dict[str, Any]:
    """Merge the outputs: their highest values, with members ``lowest``, ``nodes`` and ``by_node``."""
    by_node: dict[str, Any] = {}
    for outcome in outcomes:
        node, gpu = outcome.destination.node or "", outcome.destination.gpu
        if not outcome.output:
            continue
        if gpu is None:
            by_node[node] = dict(outcome.output)
        else:
            by_node.setdefault(node, {})[gpu] = dict(outcome.output)
    outputs = [outcome.output for outcome in outcomes if outcome.output and outcome.failure is None]
    highest, lowest = _merged(outputs, max), _merged(outputs, min)
    return {**(highest or {}), "lowest": lowest or {}, "nodes": len(by_node), "by_node": by_node}


def output_by_job(outcomes: Iterable[DestinationOutcome]) -> dict[str, Any]:
    """Merge the outputs: their highest values, with all of them as `BY_JOB`."""
    done = [outcome for outcome in outcomes if outcome.output]
    highest = _merged([outcome.output for outcome in done if outcome.failure is None], max)
    return {**(highest or {}), BY_JOB: {outcome.destination.job: dict(outcome.output) for outcome in done}}


def _merged(values: Collection[Any], pick: Callable[[Iterable[Any]], Any]) -> Any:
    present = [value for value in values if value is not None]
    if not present:
        return None
    if all(isinstance(value, Mapping) for value in present):
        names = dict.fromkeys(name for value in present for name in value)
        members = {name: _merged([value.get(name) for value in present], pick) for name in names}
        return {name: member for name, member in members.items() if member is not _DIFFERS}
    if all(isinstance(value, int | float) for value in present):
        return pick(present)
    return present[0] if all(value == present[0] for value in present) else _DIFFERS
