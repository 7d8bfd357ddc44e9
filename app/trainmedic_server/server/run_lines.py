"""What the line of a run says beyond its own members: deadline, who decided, when it was taken back. Pure."""

from __future__ import annotations

from datetime import datetime

from trainmedic_server.domain import approval
from trainmedic_server.domain.run import Run, StepState, StepStatus, UndoStatus

_ANSWERED = (StepStatus.SUCCEEDED, StepStatus.REJECTED)


def deadline_of(run: Run) -> datetime | None:
    """When what an open run is at ends by itself."""
    if not run.is_open:
        return None
    at = next((step for step in run.steps if step.status in (StepStatus.RUNNING, StepStatus.WAITING)), None)
    if at is None:
        return None
    if at.deadline is None and at.status is StepStatus.RUNNING and at.attempts:
        return at.attempts[-1].deadline
    return at.deadline


def decided_at(run: Run) -> datetime | None:
    """When people last approved or rejected what it asked."""
    return max((step.ended_at for step in _decided(run) if step.ended_at is not None), default=None)


def undone_at(run: Run) -> datetime | None:
    """When the last of the run's undos was carried out; None where none was, or one is still owed."""
    if run.owes_undo:
        return None
    last = [step.undo.attempts[-1] for step in run.steps if step.undo and step.undo.status is UndoStatus.DONE]
    return max((attempt.ended_at for attempt in last if attempt.ended_at is not None), default=None)


def _decided(run: Run) -> list[StepState]:
    """The questions that people have answered."""
    answers = (step for step in run.steps if step.kind == "approve" and step.status in _ANSWERED)
    return [step for step in answers if approval.approvers(step) or step.output.get("by")]
