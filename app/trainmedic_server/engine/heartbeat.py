"""Heartbeat: records that the server is alive, clock steps, and scheduled starts and ends of pauses."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from trainmedic.wire.steady_time import ClockStep
from trainmedic_server import telemetry
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import ClockStepped
from trainmedic_server.domain.run import Controls, Event
from trainmedic_server.domain.time_gaps import TimeGap
from trainmedic_server.engine import pausing
from trainmedic_server.engine.timeline import Timeline
from trainmedic_server.ports.outside import Clock, ClockWatch
from trainmedic_server.ports.store import Transaction

_SENTENCES = {  # log events by `ClockStep.kind`
    "stepped": "machine clock was set; keeping the previous time for now",
    "believed": "machine clock was set; following it now",
    "returned": "machine clock returned to the previous time",
}

log = telemetry.logger(__name__)


class Heartbeat:
    """Unwritten data is included in the next beat."""

    def __init__(self, clock: Clock, timeline: Timeline, watch: ClockWatch, metrics: telemetry.Metrics) -> None:
        self._clock = clock
        self._timeline = timeline
        self._watch = watch
        self._metrics = metrics
        self._events: list[Event] = []
        self._gaps: list[TimeGap] = []
        self._set_back_by = timedelta(0)
        metrics.clock_ahead_seconds.set_function(lambda: watch.ahead)

    def begin(self, tx: Transaction) -> timedelta:
        """Load an earlier server's state and return the downtime, zero if unknown."""
        alive_at, now = tx.controls().alive_at, self._clock.now()
        self._timeline.begin(tx.time_gaps(), alive_at)
        return max(now - alive_at, timedelta(0)) if alive_at is not None else timedelta(0)

    def beat(self, tx: Transaction) -> Controls:
        """Write the heartbeat. Call `note_written` once it is durable."""
        now = self._clock.now()
        self._collect_clock_steps(now)
        tx.add_time_gaps(self._gaps)
        if self._set_back_by:
            # Otherwise alerts would count as reported, and undos not be due, until the clock caught up.
            tx.limit_last_reports(now)
        controls = tx.controls()
        controls, events = pausing.settle(controls, controls.alive_at, now)
        tx.append([*self._events, *events])
        if controls.breaker_closed_at is not None and controls.breaker_closed_at > now:
            # The clock was set back. Counting too many acts is safe, too few is not.
            controls = replace(controls, breaker_closed_at=None)
        alive = replace(controls, alive_at=now)
        tx.save_controls(alive)
        return alive

    def note_written(self) -> bool:
        """Mark the last beat as durable. Return whether the clock was set back; future times then need a check."""
        was_set_back = bool(self._set_back_by)
        self._events, self._gaps, self._set_back_by = [], [], timedelta(0)
        return was_set_back

    def _collect_clock_steps(self, now: datetime) -> None:
        self._gaps += self._timeline.take_unwritten()
        steps: Sequence[ClockStep] = self._watch.take_steps()
        for step in steps:
            seconds = round(step.seconds)
            log.warning(_SENTENCES[step.kind], seconds=seconds)
            self._metrics.clock_steps.labels(step.kind).inc()
            self._events.append(recorded(ClockStepped(step.kind, seconds), now))
        set_back_by = self._timeline.take_set_back()
        # Steps while no server ran are found by comparison with the last heartbeat.
        if set_back_by and not any(step.kind == "believed" for step in steps):
            seconds = -round(set_back_by.total_seconds())
            log.warning("machine clock is behind the last heartbeat", seconds=seconds)
            self._metrics.clock_steps.labels("believed").inc()
            self._events.append(recorded(ClockStepped("believed", seconds), now))
        self._set_back_by += set_back_by
