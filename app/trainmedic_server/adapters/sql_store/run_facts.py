"""What a run counts for in the tallies of its playbook. Who calls it: ``transaction``, as it writes a run; ``tallies``
adds the facts up.

Facts are counted in the transaction that writes the run, by day, so that counting a month reads a few thousand rows
however many runs there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta

from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.run import Run, Status, StepStatus

STATUS, EFFECT, REPAIR_SECONDS, PERSON_SECONDS = "status", "effect", "repair_seconds", "person_seconds"
"""What is before the colon of a fact with a value, such as ``status:succeeded``."""
TIMED_OUT, REPEATED = "timed_out", "repeated"
REPEATED_WITHIN = timedelta(hours=1)

Key = tuple[int, str, str]
"""A day, a playbook and a fact: the key of ``playbook_days``."""
Counts = Counter[Key]

MICROSECONDS_OF_A_DAY = 86_400_000_000
_ANSWERED = (StepStatus.SUCCEEDED, StepStatus.REJECTED)


def day_of(moment: datetime) -> int:
    """The day by UTC, in days since 1970."""
    return microseconds_of(moment) // MICROSECONDS_OF_A_DAY


def rounded(seconds: float) -> float:
    """To two digits, so that there are few different ones to count."""
    return float(f"{seconds:.2g}")


def count_change(counts: Counts, run: Run, before: Run | None) -> None:
    """Count a run that is written and was `before`; nothing changes, as a rule, while its status stays."""
    if before is not None and before.status is run.status:
        return
    day = day_of(run.created_at)
    for fact in _facts_of(run):
        counts[day, run.playbook, fact] += 1
    for fact in _facts_of(before) if before is not None else ():
        counts[day, run.playbook, fact] -= 1


def can_repeat(run: Run) -> bool:
    """Whether a run of the same playbook on its target within the hour before makes it a repeated one."""
    return run.status not in (Status.NOT_STARTED, Status.OBSERVED) and run.mode is not Mode.OBSERVE


def _facts_of(run: Run) -> Iterator[str]:
    yield f"{STATUS}:{run.status}"
    if run.is_open or run.status is Status.NOT_STARTED:
        return
    if run.status is Status.SUCCEEDED and run.ended_at is not None:
        yield f"{REPAIR_SECONDS}:{rounded((run.ended_at - run.created_at).total_seconds())}"
    if run.status is not Status.OBSERVED and any(step.status is StepStatus.TIMED_OUT for step in run.steps):
        yield TIMED_OUT
    for step in run.steps:
        if step.kind == "approve" and step.status in _ANSWERED and step.started_at and step.ended_at:
            yield f"{PERSON_SECONDS}:{rounded((step.ended_at - step.started_at).total_seconds())}"
