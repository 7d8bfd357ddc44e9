"""The reports of ends in the history: which events report one, in order and by job. Pure.

Who calls it: ``job_diagnoses``. What follows from a report: ``diagnosis.reported_end``.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainmedic.wire import notice as notices
from trainmedic_server.diagnosis import reported_end
from trainmedic_server.diagnosis.reported_end import ReportedEnd
from trainmedic_server.domain.run import Event

KINDS = (notices.FAILED, notices.ENDED, notices.GONE)
"""The events of the history that report an end."""


def of_event(event: Event) -> ReportedEnd | None:
    """Return the report in an event of the history. None for an end that a user stated, or without a job."""
    data = event.data
    if event.kind not in KINDS or event.actor != "trainmedic" or not isinstance(data.get("job"), str):
        return None
    report = reported_end.of_members(data["job"], event.at, data, is_failure=event.kind != notices.ENDED)
    # Without an attempt, the server itself declared the job gone, because of silence.
    return None if event.kind == notices.GONE and report.attempt is None else report


def by_job(events: Iterable[Event]) -> dict[str, list[ReportedEnd]]:
    """Return the reports of each job, in the order of the events. The failure of an attempt whose launcher then gives
    up counts once."""
    reports: dict[str, list[ReportedEnd]] = {}
    for event in events:
        report = of_event(event)
        if report is None:
            continue
        earlier = reports.setdefault(report.job, [])
        is_repeat = event.kind == notices.GONE and bool(earlier) and earlier[-1].attempt == report.attempt
        if not is_repeat:
            earlier.append(report)
    return reports
