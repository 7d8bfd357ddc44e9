"""Facts about runs for the tallies, counted by day in the transaction that writes the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta

from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.run import Run, Status, StepStatus

# Facts. These four are followed by a value, as in ``status:failed``.
STATUS, EFFECT, REPAIR_SECONDS, PERSON_SECONDS = "status", "effect", "repair_seconds", "person_seconds"
TIMED_OUT, REPEATED = "timed_out", "repeated"
REPEATED_WITHIN = timedelta(hours=1)  # From the end of a playbook's last run on the target to the next run.

Key = tuple[int, str, str]  # Day since 1970, playbook and fact.
Counts = Counter[Key]

MICROSECONDS_OF_A_DAY = 86_400_000_000
_ANSWERED = (StepStatus.SUCCEEDED, StepStatus.REJECTED)


def day_of(moment: datetime) -> int:
    return microseconds_of(moment) // MICROSECONDS_OF_A_DAY


def rounded(seconds: float) -> float:
    """Keep two digits, to limit the number of distinct values."""
    return float(f"{seconds:.2g}")


def count_change(counts: Counts, run: Run, before: Run | None) -> None:
    """Count `run` in place of `before`, if its status differs. `before` is None for a new run."""
    if before is not None and before.status is run.status:
        return
    day = day_of(run.created_at)
    for fact in _facts_of(run):
        counts[day, run.playbook, fact] += 1
    for fact in _facts_of(before) if before is not None else ():
        counts[day, run.playbook, fact] -= 1


def may_be_repetition(run: Run) -> bool:
    is_real = run.status not in (Status.NOT_STARTED, Status.OBSERVED) and run.mode is not Mode.OBSERVE
    return is_real and run.parent is None and not run.is_limited


def _facts_of(run: Run) -> Iterator[str]:
    yield f"{STATUS}:{run.status}"
    if run.is_open or run.status is Status.NOT_STARTED:
        return
    if run.status is Status.SUCCEEDED and run.ended_at is not None:
        yield f"{REPAIR_SECONDS}:{rounded((run.ended_at - run.created_at).total_seconds())}"
    if run.status is not Status.OBSERVED and any(step.status is StepStatus.TIMED_OUT for step in run.steps):
        yield TIMED_OUT
    for step in run.steps:
        if not (step.kind == "approve" and step.status in _ANSWERED and step.started_at and step.ended_at):
            continue
        if step.deadline is None or step.ended_at < step.deadline:  # else `on_timeout` may have decided
            yield f"{PERSON_SECONDS}:{rounded((step.ended_at - step.started_at).total_seconds())}"
