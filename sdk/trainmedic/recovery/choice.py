"""Which checkpoint a rollback goes to, of those that satisfy it, and why it passes over newer ones.

The newest that is healthy and lies a margin of steps before the trouble began (``health``, `_margin`); where only those
within the margin are healthy, the newest of these. Where the trouble has come back after an earlier rollback, an older
one than that went to. All of it is worked out from values, so that rank 0 can do it for all ranks (`agree`), and
a thread that must not read tensors can do it without the losses.

An integration uses it so::

    choice = choose(its_checkpoints, rollback, step, onset_of(rollback, medic.progress), budget.spent)
    budget.check(choice.best.step, step)
    ... load the first of choice.candidates that can be, and answer with passed_over=choice.told()

Not here: which checkpoints satisfy a rollback (``checkpoints``), how many rollbacks there may be
(``rollback_budget``).
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

MARGIN = 5
"""Steps before the trouble began in which a checkpoint is avoided: a raised loss shows what earlier steps have done."""
_SHORT_MARGIN = 2
"""The same where five would cost many steps. The weights of a checkpoint are known to be good only where a loss that
came of them was."""
_MOST_TOLD = 20


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that satisfies a rollback, and that it does not go to."""

    name: str
    step: int
    why: str


@dataclass(frozen=True)
class Choice:
    """The checkpoints that a rollback may go to."""

    candidates: tuple[SavedCheckpoint, ...]
    """Best first; where one cannot be loaded, the next is meant. There is at least one."""
    passed_over: tuple[PassedOver, ...] = ()
    """The newer ones that satisfy it as well."""

    @property
    def best(self) -> SavedCheckpoint:
        return self.candidates[0]

    def told(self) -> list[dict[str, Any]]:
        """The checkpoints that were passed over, for the answer to the command: its member ``passed_over``."""
        return [{"checkpoint": each.name, "step": each.step, "why": each.why} for each in self.passed_over]


def choose(
    present: Sequence[SavedCheckpoint],
    rollback: Rollback,
    step: int,
    onset: Onset | None = None,
    spent: RollbackCount | None = None,
) -> Choice:
    """The choice for `rollback`, ordered at `step`, of the checkpoints that there are.

    ``onset`` is when the trouble began, and ``spent`` what the budget has counted. Raises Rejected where no checkpoint
    satisfies the rollback, or none of these is healthy.
    """
    fitting = checkpoints.candidates(present, rollback, step)
    # By identity, for the path of a user's own checkpoint may be anything.
    ill = {id(checkpoint): why for checkpoint in fitting if (why := _illness(checkpoint, onset))}
    healthy = [checkpoint for checkpoint in fitting if id(checkpoint) not in ill]
    if not healthy:
        reasons = "; ".join(f"{each.name}: {ill[id(each)]}" for each in fitting[:_MOST_TOLD])
        raise Rejected(f"no checkpoint that could be meant is healthy: {reasons}")
    avoided = _too_late(healthy, onset)
    preferred = [checkpoint for checkpoint in healthy if id(checkpoint) not in avoided]
    # One to a named step, or to the newest of all, says itself how far to go.
    is_relative = rollback.before is not None or rollback.steps_back is not None
    if is_relative and spent is not None and preferred:
        avoided |= _not_far_enough(preferred, spent)
    best_first = sorted(healthy, key=lambda checkpoint: id(checkpoint) in avoided)
    why_not = {**avoided, **ill}
    newer = fitting[: fitting.index(best_first[0])]
    passed_over = [PassedOver(each.name, each.step, why_not[id(each)]) for each in newer]
    return Choice(tuple(best_first), tuple(passed_over[:_MOST_TOLD]))


def agree(group: Group, decide: Callable[[], Choice]) -> Choice:
    """Return on all ranks what `decide` returns on rank 0, or raise what it raises there.

    Raises Unsupported where a path cannot be sent to other ranks, and NotAgreed.
    """
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


def _illness(checkpoint: SavedCheckpoint, onset: Onset | None) -> str:
    why = problem(checkpoint.health)
    if not why and onset is not None and onset.is_rise and checkpoint.step >= onset.shown_at:
        return f"the losses had risen when it was written, from step {onset.shown_at} on"
    return why


def _too_late(healthy: Sequence[SavedCheckpoint], onset: Onset | None) -> dict[int, str]:
    """Of the checkpoints within the margin, why, by identity; empty where there are no others."""
    if onset is None:
        return {}
    margin = _margin(healthy, onset)
    what = "the losses rose" if onset.is_rise else "the alert began"
    late = {
        id(checkpoint): f"it is within {margin} steps of step {onset.step}, at which {what}"
        for checkpoint in healthy
        if checkpoint.step > onset.step - margin
    }
    return late if len(late) < len(healthy) else {}


def _margin(healthy: Sequence[SavedCheckpoint], onset: Onset) -> int:
    """How many steps before the trouble a checkpoint has to lie: five. Two where five would cost more than ten steps
    and the losses show the very step at which they rose; if the trouble comes back, the next rollback goes further."""
    is_exact = onset.is_rise and onset.shown_at == onset.step
    is_cheap = any(MARGIN <= onset.step - checkpoint.step <= 2 * MARGIN for checkpoint in healthy)
    return MARGIN if is_cheap or not is_exact else _SHORT_MARGIN


def _not_far_enough(preferred: Sequence[SavedCheckpoint], spent: RollbackCount) -> dict[int, str]:
    """Of the checkpoints that an earlier rollback for the same trouble has reached, why, by identity; empty where there
    are none beyond."""
    if not spent.is_continued_by(preferred[0].step):
        return {}
    tried = {
        id(checkpoint): f"the trouble came back after a rollback to step {spent.root_step}"
        for checkpoint in preferred
        if checkpoint.step >= spent.root_step
    }
    return tried if len(tried) < len(preferred) else {}
