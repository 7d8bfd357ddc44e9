"""The failures of a job, by what the history says of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from trainmedic_server.domain.run import Event
from trainmedic_server.ports.verdicts import VerdictRecord
from trainmedic_server.reports.goodput import JobMoments

FAILED, GONE, ENDED, RESTARTED = "job_failed", "job_gone", "job_ended", "job_restarted"
JOB_EVENTS = (FAILED, GONE, ENDED, RESTARTED, "job_returned")
_SAME_FAILURE = 120.0
"""Seconds between the end of a process, its being missed, and the verdict on it, that are all of one failure."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A failure of the job, or its disappearance."""

    at: datetime
    kind: str
    """``job_failed`` or ``job_gone``."""
    reason: str
    """What its last process or its launcher has said; for a person."""
    down_seconds: float | None
    """Until it was started again or came back; None where it has not been yet, or nobody told."""
    verdict: VerdictRecord | None


def moments(events: Iterable[Event]) -> JobMoments:
    """When these events say that the job has failed or ended."""
    told = [(event.kind, event.at.timestamp()) for event in events]
    return JobMoments(
        failed=tuple(at for kind, at in told if kind in (FAILED, GONE)),
        ended=tuple(at for kind, at in told if kind == ENDED),
    )


def failures_of(events: Sequence[Event], verdicts: Sequence[VerdictRecord]) -> list[FailureRecord]:
    """Each failure once: a job that failed and is not started again is gone a minute later, for the same reason."""
    failures: list[FailureRecord] = []
    for index, event in enumerate(events):
        if event.kind not in (FAILED, GONE):
            continue
        if event.kind == GONE and failures and _is_down_since(failures[-1], events[:index]):
            continue
        back = next((later for later in events[index + 1 :] if later.kind not in (FAILED, GONE)), None)
        down = (back.at - event.at).total_seconds() if back is not None and back.kind != ENDED else None
        reason = str(event.data.get("reason", ""))
        failures.append(FailureRecord(event.at, event.kind, reason, down, _verdict_on(event, verdicts)))
    return failures


def _is_down_since(failure: FailureRecord, events: Sequence[Event]) -> bool:
    """Whether nothing has been heard of the job between this failure and the end of `events`."""
    return not any(event.at > failure.at and event.kind not in (FAILED, GONE) for event in events)


def _verdict_on(event: Event, verdicts: Sequence[VerdictRecord]) -> VerdictRecord | None:
    near = [verdict for verdict in verdicts if abs((verdict.at - event.at).total_seconds()) <= _SAME_FAILURE]
    return min(near, key=lambda verdict: abs(verdict.at - event.at), default=None)
