# Failures of a job, from its recorded events and its verdicts.
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain.event_codec import content_of, name_of, names
from trainmedic_server.domain.run import Event
from trainmedic_server.ports.verdicts import VerdictRecord
from trainmedic_server.reports.goodput import JobMoments
from trainmedic_server.reports.points import Stretch

FAILED, GONE, ENDED, RESTARTED = map(name_of, (kinds.JobFailed, kinds.JobGone, kinds.JobEnded, kinds.JobRestarted))
JOB_EVENTS = names(kinds.LifeEvent)
DIAGNOSED = "diagnosed"
_VERDICT_BEFORE, _VERDICT_AFTER = timedelta(minutes=30), timedelta(minutes=2)
"""Time between a verdict and its failure: a fault may show long before it ends the job."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    at: datetime
    kind: str  # `FAILED`, `GONE` or `DIAGNOSED` (by a verdict alone).
    reason: str
    down_seconds: float | None  # None if it has not started again, or that was not reported.
    verdict: VerdictRecord | None


def moments(events: Sequence[Event]) -> JobMoments:
    """Return failures, ends, and downtimes after reported failures. A disappearance has no downtime."""
    reported = [(event.kind, event.at.timestamp()) for event in events]
    restarted: list[Stretch] = []
    for failure in _failures(events):
        begin = failure.at.timestamp()
        # A process and the launcher may report the same failure.
        is_another = not restarted or begin >= restarted[-1].end
        if failure.kind == FAILED and failure.down_seconds is not None and is_another:
            restarted.append(Stretch(begin, begin + failure.down_seconds))
    return JobMoments(
        failed=tuple(at for kind, at in reported if kind in (FAILED, GONE)),
        ended=tuple(at for kind, at in reported if kind == ENDED),
        restarted=restarted,
    )


def failures_of(events: Sequence[Event], verdicts: Sequence[VerdictRecord]) -> list[FailureRecord]:
    """Return failures with their verdicts, oldest first. A verdict without a reported failure counts as one."""
    failures = _failures(events)
    times = [failure.at for failure in failures]
    verdict_of: dict[int, VerdictRecord] = {}
    unmatched = []
    for verdict in verdicts:
        first, last = bisect_left(times, verdict.at - _VERDICT_AFTER), bisect_right(times, verdict.at + _VERDICT_BEFORE)
        near = range(first, last)
        best = min(near, key=lambda number: abs(failures[number].at - verdict.at), default=None)
        if best is None:
            unmatched.append(FailureRecord(verdict.at, DIAGNOSED, verdict.summary, None, verdict))
        elif best not in verdict_of or verdict.at > verdict_of[best].at:
            verdict_of[best] = verdict
    matched = [replace(failure, verdict=verdict_of.get(number)) for number, failure in enumerate(failures)]
    return sorted([*matched, *unmatched], key=lambda failure: failure.at)


def _failures(events: Sequence[Event]) -> list[FailureRecord]:
    """Return failures without verdicts. A job that fails and then disappears is one."""
    failures: list[FailureRecord] = []
    next_life: Event | None = None  # next event that is no failure
    for before, event in reversed(list(zip((None, *events), events, strict=False))):
        if event.kind not in (FAILED, GONE):
            next_life = event
        elif event.kind == FAILED or before is None or before.kind not in (FAILED, GONE):
            is_back = next_life is not None and next_life.kind != ENDED
            down = (next_life.at - event.at).total_seconds() if next_life and is_back else None
            content = content_of(event)
            reason = content.reason if isinstance(content, kinds.LifeEvent) else ""
            failures.append(FailureRecord(event.at, event.kind, reason, down, None))
    return failures[::-1]
