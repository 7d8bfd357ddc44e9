"""History events for changed evaluation results in job presences.

After a restart the newest values are repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from trainmedic.wire import evaluations as wire
from trainmedic.wire.evaluations import EvaluatedMetric
from trainmedic_server.domain.event_codec import content_of, recorded
from trainmedic_server.domain.event_kinds import JobEvaluated
from trainmedic_server.domain.run import Event
from trainmedic_server.ports.outside import Presence

APART = timedelta(minutes=1)  # least time between two events of a job
MOST_JOBS = 10_000  # jobs whose results are compared; others give no events


class JobEvaluations:
    def __init__(self) -> None:
        self._recorded: dict[str, Mapping[str, EvaluatedMetric]] = {}  # all results at a job's last event
        self._recorded_at: dict[str, datetime] = {}
        self._shown: dict[str, Mapping[str, EvaluatedMetric]] = {}  # by the job's last presence with results

    def due(self, jobs: Sequence[Presence], now: datetime) -> list[Event]:
        """Return due events. Call `note_recorded` once they are stored."""
        present = {}
        for job in jobs:
            metrics = wire.read(job.details.get(wire.FIELD)) if job.doubt is None else ()
            present[job.name] = {metric.name: metric for metric in metrics}
        for name, metrics_now in present.items():
            if metrics_now and (name in self._shown or len(self._shown) < MOST_JOBS):
                self._shown[name] = metrics_now
        events = []
        for name, shown in self._shown.items():
            known = self._recorded.get(name, {})
            news = [metric for metric in shown.values() if known.get(metric.name) != metric]
            # A gone job reports no more, so its last values are due at once.
            before = self._recorded_at.get(name)
            is_due = name not in present or before is None or now - before >= APART
            if news and is_due:
                events.append(recorded(JobEvaluated(name, wire.as_plain(news)), now))
        return events

    def note_recorded(self, events: Sequence[Event], jobs: Sequence[Presence]) -> None:
        for event in events:
            if isinstance(content := content_of(event), JobEvaluated):
                self._recorded[content.job] = dict(self._shown[content.job])
                self._recorded_at[content.job] = event.at
        present = {job.name for job in jobs}
        for name in [name for name in self._shown if name not in present]:
            for kept in (self._shown, self._recorded, self._recorded_at):
                kept.pop(name, None)
