"""The reports of ends in the history: which events report one, in order and by job. Pure.

Who calls it: ``job_diagnoses``. What follows from a report: ``trainmedic_logs.diagnosis.reported_end``.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainmedic_logs.diagnosis import reported_end
from trainmedic_logs.diagnosis.reported_end import ReportedEnd
from trainmedic_server.domain.event_codec import content_of, name_of, names
from trainmedic_server.domain.event_kinds import JobEnded, JobFailed, JobGone
from trainmedic_server.domain.run import Event

KINDS = names(JobFailed, JobEnded, JobGone)
"""The events of the history that report an end."""
_GONE = name_of(JobGone)


def of_event(event: Event) -> ReportedEnd | None:
    """Return the report in an event of the history. None for an end that a user stated, or without a job."""
    content = content_of(event)
    if not isinstance(content, (JobFailed, JobEnded, JobGone)) or event.actor != "trainmedic":
        return None
    # Without an attempt, the server itself declared the job gone, because of silence.
    if isinstance(content, JobGone) and content.attempt is None:
        return None
    return reported_end.of_members(content.job, event.at, event.data, is_failure=not isinstance(content, JobEnded))


def by_job(events: Iterable[Event]) -> dict[str, list[ReportedEnd]]:
    """Return the reports of each job, in the order of the events. The failure of an attempt whose launcher then gives
    up counts once."""
    reports: dict[str, list[ReportedEnd]] = {}
    for event in events:
        report = of_event(event)
        if report is None:
            continue
        earlier = reports.setdefault(report.job, [])
        is_repeat = event.kind == _GONE and bool(earlier) and earlier[-1].attempt == report.attempt
        if not is_repeat:
            earlier.append(report)
    return reports
