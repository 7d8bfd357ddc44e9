"""The failures of a job, by what the history says of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain.event_codec import content_of, name_of, names
from trainmedic_server.domain.run import Event
from trainmedic_server.ports.verdicts import VerdictRecord
from trainmedic_server.reports.goodput import JobMoments
from trainmedic_server.reports.points import Stretch

FAILED, GONE, ENDED, RESTARTED = map(name_of, (kinds.JobFailed, kinds.JobGone, kinds.JobEnded, kinds.JobRestarted))
JOB_EVENTS = names(kinds.LifeEvent)
DIAGNOSED = "diagnosed"
"""The kind of a failure of which only a verdict tells."""
_SHOWS_BEFORE = 1800.0
_FOUND_AFTER = 120.0
"""Seconds by which the first sign of a failure may come before it is told that the job failed, and after it."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A failure of the job, or its disappearance."""

    at: datetime
    kind: str
    """``job_failed`` or ``job_gone``; ``diagnosed`` where only a verdict tells of it."""
    reason: str
    """What its last process or its launcher has said; for a person."""
    down_seconds: float | None
    """Until it was started again or came back; None where it has not been yet, or nobody told."""
    verdict: VerdictRecord | None


def moments(events: Sequence[Event]) -> JobMoments:
    """When these events say that the job has failed or ended, and how long it took to start it again after a failure
    that itself or its launcher told of: that it is gone is only what was not heard."""
    told = [(event.kind, event.at.timestamp()) for event in events]
    restarted: list[Stretch] = []
    for failure in _told(events):
        begin = failure.at.timestamp()
        is_another = not restarted or begin >= restarted[-1].end  # both may tell of the same
        if failure.kind == FAILED and failure.down_seconds is not None and is_another:
            restarted.append(Stretch(begin, begin + failure.down_seconds))
    return JobMoments(
        failed=tuple(at for kind, at in told if kind in (FAILED, GONE)),
        ended=tuple(at for kind, at in told if kind == ENDED),
        restarted=restarted,
    )


def failures_of(events: Sequence[Event], verdicts: Sequence[VerdictRecord]) -> list[FailureRecord]:
    """Each failure once, oldest first, with the verdict on it; a verdict on what nobody has told of is one as well."""
    told = _told(events)
    of_failure: dict[int, VerdictRecord] = {}
    alone = []
    for verdict in verdicts:
        near = [number for number, failure in enumerate(told) if _may_be_of(verdict, failure)]
        best = min(near, key=lambda number: abs(told[number].at - verdict.at), default=None)
        if best is None:
            alone.append(FailureRecord(verdict.at, DIAGNOSED, verdict.summary, None, verdict))
        elif best not in of_failure or verdict.at > of_failure[best].at:
            of_failure[best] = verdict
    whole = [replace(failure, verdict=of_failure.get(number)) for number, failure in enumerate(told)]
    return sorted([*whole, *alone], key=lambda failure: failure.at)


def _told(events: Sequence[Event]) -> list[FailureRecord]:
    """A job that failed and is not started again is gone a minute later, for the same reason: that is one failure."""
    failures: list[FailureRecord] = []
    for index, event in enumerate(events):
        if event.kind not in (FAILED, GONE):
            continue
        if event.kind == GONE and failures and _is_down_since(failures[-1], events[:index]):
            continue
        back = next((later for later in events[index + 1 :] if later.kind not in (FAILED, GONE)), None)
        down = (back.at - event.at).total_seconds() if back is not None and back.kind != ENDED else None
        content = content_of(event)
        reason = content.reason if isinstance(content, kinds.LifeEvent) else ""
        failures.append(FailureRecord(event.at, event.kind, reason, down, None))
    return failures


def _is_down_since(failure: FailureRecord, events: Sequence[Event]) -> bool:
    """Whether nothing has been heard of the job between this failure and the end of `events`."""
    return not any(event.at > failure.at and event.kind not in (FAILED, GONE) for event in events)


def _may_be_of(verdict: VerdictRecord, failure: FailureRecord) -> bool:
    """A failure may show long before it ends the job, as a hang does, or be found a little after."""
    return -_SHOWS_BEFORE <= (verdict.at - failure.at).total_seconds() <= _FOUND_AFTER
