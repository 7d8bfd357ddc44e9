"""Choice of a rollback's checkpoint. Pure.

It is the newest healthy one, if possible a margin before the fault, and older than those after which the fault
returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from trainmedic.errors import Rejected
from trainmedic.job.group import Group
from trainmedic.job.parameters import Rollback
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import Onset, problem
from trainmedic.recovery.rollback_budget import RollbackCount

MARGIN = 5  # steps before the fault: a higher loss shows earlier steps' effect
_SHORT_MARGIN = 2  # if the start is exact and no checkpoint is `MARGIN` to twice as many steps before it
_MOST_REPORTED = 20  # checkpoints in an answer


@dataclass(frozen=True)
class PassedOver:
    name: str
    step: int
    why: str


@dataclass(frozen=True)
class Choice:
    candidates: tuple[SavedCheckpoint, ...]  # at least one, best first
    passed_over: tuple[PassedOver, ...] = ()  # newer ones than the best

    @property
    def best(self) -> SavedCheckpoint:
        return self.candidates[0]

    def passed_over_json(self) -> list[dict[str, Any]]:
        return [{"checkpoint": each.name, "step": each.step, "why": each.why} for each in self.passed_over]


def choose(
    present: Sequence[SavedCheckpoint],
    rollback: Rollback,
    step: int,
    onset: Onset | None = None,
    spent: RollbackCount | None = None,
) -> Choice:
    """Choose for a rollback at ``step``. Raises Rejected if none is suitable and healthy.

    ``onset``: start of the fault. ``spent``: earlier rollbacks.
    """
    fitting = checkpoints.candidates(present, rollback, step)
    # By identity: the path of a user's own checkpoint may be unhashable.
    unhealthy = {id(checkpoint): why for checkpoint in fitting if (why := _why_unhealthy(checkpoint, onset))}
    healthy = [checkpoint for checkpoint in fitting if id(checkpoint) not in unhealthy]
    if not healthy:
        reasons = "; ".join(f"{each.name}: {unhealthy[id(each)]}" for each in fitting[:_MOST_REPORTED])
        raise Rejected(f"no suitable checkpoint is healthy: {reasons}")
    avoided = _too_late(healthy, onset)
    preferred = [checkpoint for checkpoint in healthy if id(checkpoint) not in avoided]
    # A rollback to a named step, or to the newest checkpoint, already states how far to go.
    is_relative = rollback.before is not None or rollback.steps_back is not None
    if is_relative and spent is not None and preferred:
        avoided |= _not_far_enough(preferred, spent)
    best_first = sorted(healthy, key=lambda checkpoint: id(checkpoint) in avoided)
    why_not = {**avoided, **unhealthy}
    newer = fitting[: fitting.index(best_first[0])]
    passed_over = [PassedOver(each.name, each.step, why_not[id(each)]) for each in newer]
    return Choice(tuple(best_first), tuple(passed_over[:_MOST_REPORTED]))


def agree(group: Group, decide: Callable[[], Choice]) -> Choice:
    """Return or raise rank 0's `decide()` on all ranks. Raises NotAgreed and Unsupported."""
    if group.world_size == 1:
        return decide()

    def as_json() -> Mapping[str, Any]:
        choice = decide()
        return {
            "candidates": [checkpoints.to_json(checkpoint) for checkpoint in choice.candidates],
            "passed_over": [[each.name, each.step, each.why] for each in choice.passed_over],
        }

    members = group.choose(as_json)
    return Choice(
        tuple(checkpoints.from_json(fields) for fields in members["candidates"]),
        tuple(PassedOver(*fields) for fields in members["passed_over"]),
    )


def _why_unhealthy(checkpoint: SavedCheckpoint, onset: Onset | None) -> str:
    why = problem(checkpoint.health)
    if not why and onset is not None and onset.is_rise and checkpoint.step >= onset.shown_at:
        return f"the losses had risen when it was written, from step {onset.shown_at} on"
    return why


def _too_late(healthy: Sequence[SavedCheckpoint], onset: Onset | None) -> dict[int, str]:
    """Return reasons by identity; none if all are too late."""
    if onset is None:
        return {}
    margin = _margin(healthy, onset)
    event = "the losses rose" if onset.is_rise else "the alert began"
    late = {
        id(checkpoint): f"it is within {margin} steps of step {onset.step}, at which {event}"
        for checkpoint in healthy
        if checkpoint.step > onset.step - margin
    }
    return late if len(late) < len(healthy) else {}


def _margin(healthy: Sequence[SavedCheckpoint], onset: Onset) -> int:
    """Return five steps, or two if five would cost more than ten and the losses show the exact start."""
    is_exact = onset.is_rise and onset.shown_at == onset.step
    is_cheap = any(MARGIN <= onset.step - checkpoint.step <= 2 * MARGIN for checkpoint in healthy)
    return MARGIN if is_cheap or not is_exact else _SHORT_MARGIN


def _not_far_enough(preferred: Sequence[SavedCheckpoint], spent: RollbackCount) -> dict[int, str]:
    """Return reasons for those since the earliest rollback for the same fault, by identity; none if all are."""
    if not spent.is_continued_by(preferred[0].step):
        return {}
    tried = {
        id(checkpoint): f"the fault returned after a rollback to step {spent.root_step}"
        for checkpoint in preferred
        if checkpoint.step >= spent.root_step
    }
    return tried if len(tried) < len(preferred) else {}
