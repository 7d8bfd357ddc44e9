"""Prometheus metrics and structured logging.

A log event is a constant text with values as fields; the task that drives a run binds ``run_id``. Neither contains
parameters, bodies, URLs or tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic_core import to_json

from trainmedic_core.plain_text import visible
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.run import Run, Status

# From a fast commit (1 ms) to a step that waits for a slow action (30 min).
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_LOOP_CHECK_SECONDS = 0.25

MOST_JOBS_SHOWN = 1000  # Anyone who can write to Redis can name jobs

MOST_GPUS_SHOWN = 32_768  # 4,096 nodes with 8 GPUs


class JobMetrics(Collector):
    def __init__(self) -> None:
        self._lives: Sequence[JobLife] = ()
        self._gpus: Sequence[tuple[str, str, str]] = ()

    def show_gpus(self, gpus: Collection[tuple[str, str, str]]) -> None:
        """Set the GPUs in use: (job, node, UUID)."""
        self._gpus = sorted(gpus)[:MOST_GPUS_SHOWN]

    def show(self, lives: Collection[JobLife]) -> None:
        """Set the jobs. Gone ones take precedence over the others in `MOST_JOBS_SHOWN`."""
        by_priority = sorted(lives, key=lambda life: (life.state is not LifeState.GONE, life.name))
        self._lives = by_priority[:MOST_JOBS_SHOWN]

    def collect(self) -> Iterator[Metric]:
        labels = ["job_name"]
        gone = GaugeMetricFamily(
            "trainmedic_job_gone", "1 for a job that is gone without reporting its end.", labels=labels
        )
        failures = CounterMetricFamily(
            "trainmedic_job_failures", "Failures reported by a job or its launcher.", labels=labels
        )
        restarts = CounterMetricFamily(
            "trainmedic_job_restarts", "Attempts that a launcher started after the first.", labels=labels
        )
        for life in self._lives:
            gone.add_metric([life.name], float(life.state is LifeState.GONE))
            failures.add_metric([life.name], life.failures)
            restarts.add_metric([life.name], life.restarts)
        gpus = GaugeMetricFamily(
            "trainmedic_job_gpu", "1 for a GPU that a rank of the job uses.", labels=["job_name", "gpu_node", "uuid"]
        )
        for gpu in self._gpus:
            gpus.add_metric(gpu, 1.0)
        yield from (gone, failures, restarts, gpus)


class Metrics:
    """Durations are in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_alert_counters()
        self._add_counters()
        self._add_durations()
        self._add_gauges()
        self.jobs = JobMetrics()
        self.registry.register(self.jobs)

    def _add_alert_counters(self) -> None:
        counter = functools.partial(Counter, registry=self.registry)
        self.alerts = counter("trainmedic_alerts", "Alerts received, by status.", ["status"])
        self.unmatched_alerts = counter(
            "trainmedic_unmatched_alerts",
            "Firing alerts received on which no playbook could decide, by what kept them all from it: alertname, "
            "conditions, failure, target or not_accepted.",
            ["kept_by"],
        )
        self.deliveries = counter("trainmedic_deliveries", "Webhook deliveries, by outcome.", ["outcome"])
        self.refused_deliveries = counter(
            "trainmedic_refused_deliveries",
            "Webhook deliveries that were answered with a 4xx, by reason: unauthorized, forbidden, too_large or "
            "unreadable. Alertmanager does not send them again.",
            ["reason"],
        )
        self.rejected_alerts = counter(
            "trainmedic_rejected_alerts", "Malformed alerts in deliveries whose other alerts were taken."
        )
        self.truncated = counter("trainmedic_truncated_alerts", "Alerts that Alertmanager left out of a delivery.")
        self.decisions = counter("trainmedic_decisions", "Decisions, by playbook and reason.", ["playbook", "reason"])
        self.runs = counter("trainmedic_runs", "Runs that closed, by playbook and outcome.", ["playbook", "status"])
        self.effects = counter(
            "trainmedic_effects", "Runs whose effect was measured, by playbook and verdict.", ["playbook", "verdict"]
        )
        self.undos = counter("trainmedic_undos", "Undos, by outcome.", ["status"])

    def _add_counters(self) -> None:
        counter = functools.partial(Counter, registry=self.registry)
        self.lease_renewals = counter("trainmedic_lease_renewals", "Requested lease renewals, by outcome.", ["outcome"])
        self.leases_lost = counter("trainmedic_leases_lost", "Renewed or watched effects that ended while needed.")
        self.leases_set_again = counter("trainmedic_leases_set_again", "Effects reapplied after they were lost.")
        self.store_errors = counter("trainmedic_store_errors", "Failed calls of the run store.")
        self.bus_errors = counter("trainmedic_bus_errors", "Failed calls of Redis.")
        self.prometheus_errors = counter("trainmedic_prometheus_errors", "Failed queries of Prometheus.")
        self.event_errors = counter("trainmedic_event_errors", "Failed event deliveries, by listener.", ["listener"])
        self.events_left_out = counter(
            "trainmedic_events_left_out", "Events that the receiver of --events-to rejects as invalid."
        )
        self.spans_left_out = counter(
            "trainmedic_spans_left_out", "Spans that the collector of --traces-to rejects as invalid."
        )
        self.loop_errors = counter("trainmedic_loop_errors", "Unexpected errors in background loops.", ["loop"])
        self.clock_steps = counter(
            "trainmedic_clock_steps",
            "Steps of the machine's clock by more than a minute, by kind.",
            ["kind"],
        )
        self.refused_messages = counter(
            "trainmedic_refused_messages",
            "Messages in Redis that were not genuine, could not be read, or belonged to no run.",
            ["reason"],
        )

        self.slack_left_out = counter("trainmedic_slack_left_out", "Questions and edits that Slack rejects.")
        self.slack_presses = counter("trainmedic_slack_presses", "Button clicks in Slack, by outcome.", ["outcome"])
        self.findings = counter(
            "trainmedic_findings", "Findings in logs that were new, by rule and role.", ["rule", "role"]
        )
        self.finding_updates = counter("trainmedic_finding_updates", "Finding updates received from nodes.")
        self.finding_updates_lost = counter(
            "trainmedic_finding_updates_lost", "Finding updates from nodes that the server missed."
        )
        self.findings_dropped = counter(
            "trainmedic_findings_dropped", "Findings dropped because their node or job has too many open."
        )
        self.finding_claims_cut = counter(
            "trainmedic_finding_claims_cut",
            "Updates of findings whose claimed job was dropped, because the node's files name too many.",
        )
        self.messages = counter("trainmedic_messages", "Messages to people, by kind and outcome.", ["kind", "outcome"])
        self.messages_unrouted = counter(
            "trainmedic_messages_unrouted",
            "Messages that no route takes and a default channel gets, by kind.",
            ["kind"],
        )
        self.message_errors = counter("trainmedic_message_errors", "Failed attempts to send a message.", ["channel"])
        self.finding_alert_errors = counter(
            "trainmedic_finding_alert_errors", "Failed attempts to send finding alerts."
        )

    def _add_durations(self) -> None:
        histogram = functools.partial(Histogram, buckets=_LATENCY, registry=self.registry)
        self.step_seconds = histogram("trainmedic_step_seconds", "Time of an action's attempt.", ["action", "outcome"])
        self.alert_to_action_seconds = histogram(
            "trainmedic_alert_to_action_seconds", "From receipt of an alert to its run's first act."
        )
        self.finding_to_alert_seconds = histogram(
            "trainmedic_finding_to_alert_seconds", "From a finding's arrival to the acceptance of its alert."
        )
        self.webhook_seconds = histogram("trainmedic_webhook_seconds", "From a delivery's receipt to its reply.")
        self.event_loop_lag_seconds = histogram("trainmedic_event_loop_lag_seconds", "Delay of the event loop.")
        self.batch_wait_seconds = histogram(
            "trainmedic_batch_wait_seconds", "Wait of the oldest entry of a batch, by queue.", ["queue"]
        )
        self.batch_seconds = histogram("trainmedic_batch_seconds", "Duration of handling a batch, by queue.", ["queue"])
        self.batch_size = histogram("trainmedic_batch_size", "Entries per batch, by queue.", ["queue"], buckets=_SIZES)

    def batch_watch(self, queue: str) -> Callable[[int, float, float], None]:
        """Return an observer of (batch size, seconds the oldest waited, seconds of handling)."""
        size, waited, took = (
            each.labels(queue) for each in (self.batch_size, self.batch_wait_seconds, self.batch_seconds)
        )

        def watch(number: int, wait_seconds: float, seconds: float) -> None:
            size.observe(number)
            waited.observe(wait_seconds)
            took.observe(seconds)

        return watch

    async def watch_event_loop(self) -> None:
        time = asyncio.get_running_loop().time
        while True:
            due = time() + _LOOP_CHECK_SECONDS
            await asyncio.sleep(_LOOP_CHECK_SECONDS)
            self.event_loop_lag_seconds.observe(max(0.0, time() - due))

    def _add_gauges(self) -> None:
        gauge = functools.partial(Gauge, registry=self.registry)
        self.queue_depth = gauge("trainmedic_queue_depth", "Deliveries that wait for admission.")
        self.redis_used_share = gauge(
            "trainmedic_redis_used_share", "Share of Redis capacity in use, from 0 to 1.", ["of"]
        )
        self.open_runs = gauge("trainmedic_open_runs", "Runs that are open.")
        self.undos_owed = gauge("trainmedic_undos_owed", "Runs with a pending undo.")
        self.undos_delayed = gauge("trainmedic_undos_delayed", "Runs with a pending undo that has failed.")
        self.runs_asking = gauge("trainmedic_runs_awaiting_approval", "Runs awaiting approval.")
        self.agents_lost = gauge("trainmedic_agents_lost", "Agents lost within the last day.")
        self.leases = gauge("trainmedic_leases", "Effects that are renewed, or watched in Slurm.")
        self.working = gauge("trainmedic_working", "1 while this server is the leader, 0 while on standby.")
        self.slack_connected = gauge("trainmedic_slack_connected", "1 while connected to Slack.")
        self.paused = gauge("trainmedic_paused", "1 while an operator has paused the server.")
        self.pauses = gauge("trainmedic_pauses", "Active pauses, including those of a playbook, node, job or label.")
        self.breaker_open = gauge("trainmedic_breaker_open", "1 while the breaker is open.")
        self.retention_failing = gauge(
            "trainmedic_retention_failing",
            "1 if the last archiving or deletion of old data failed.",
        )
        self.messages_waiting = gauge("trainmedic_messages_waiting", "Unsent messages to people.", ["channel"])
        self.clock_ahead_seconds = gauge(
            "trainmedic_clock_ahead_seconds",
            "Seconds by which the machine clock is ahead of the time in use; 0 while it is followed.",
        )
        self.open_findings = gauge("trainmedic_open_findings", "Open findings in logs.")
        self.log_rules_loaded = gauge("trainmedic_log_rules_loaded", "Log rules that are loaded.")
        self.log_rule_errors = gauge("trainmedic_log_rule_errors", "Files of log rules that could not be loaded.")
        self.playbooks_loaded = gauge("trainmedic_playbooks_loaded", "Playbooks that are loaded.")
        self.playbook_errors = gauge("trainmedic_playbook_errors", "Playbook files that could not be loaded.")
        self.alert_map_errors = gauge("trainmedic_alert_map_errors", "Alert map files that could not be loaded.")

    def show_run(self, before: Run | None, after: Run) -> None:
        """Update the gauges after a change. `before` is None for a new run."""
        counted = (self.undos_owed, self.undos_delayed, self.runs_asking)
        earlier = _gauge_values(before) if before is not None else (False, False, False)
        for gauge, was, now in zip(counted, earlier, _gauge_values(after), strict=True):
            if was != now:
                gauge.inc(now - was)


def _gauge_values(run: Run) -> tuple[bool, bool, bool]:
    """Return whether an undo is pending, an undo is delayed, and an approval is pending."""
    return run.owes_undo, run.delayed_undo is not None, run.status is Status.AWAITING_APPROVAL


class _Lines:
    """A structlog output. Standard library records take 2.5 times as long."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.name = name
        self._stream = stream

    def write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe must not stop the server
            self._stream.write(f"{line}\n")
            self._stream.flush()

    debug = info = warning = error = critical = write


def configure_logging(level: str = "INFO", stream: TextIO | None = None, *, readable: bool = False) -> None:
    """Write log lines to `stream` (default: standard error), as JSON or, with `readable`, as text for a terminal."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    output = stream or sys.stderr
    rendered = _readable() if readable else structlog.processors.JSONRenderer(_as_json)
    structlog.configure(
        processors=[*shared, rendered],
        logger_factory=functools.partial(_Lines, output),
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_with_own_values, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, rendered],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "alembic", "apprise", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


_add_values = structlog.stdlib.ExtraAdder()


def _with_own_values(logger: Any, method: str, line: structlog.types.EventDict) -> structlog.types.EventDict:
    """Add our own modules' extra values. Libraries' extras are for their formatters."""
    return _add_values(logger, method, line) if line["_record"].name.startswith("trainmedic") else line


def _as_json(line: structlog.types.EventDict, default: Callable[[Any], Any]) -> str:
    """Return ASCII JSON, ten times as fast as ``json.dumps`` for an ASCII line."""
    with contextlib.suppress(ValueError):  # outsiders can send half a surrogate pair in JSON; logging it must not fail
        written = to_json(line, fallback=default)
        if written.isascii():
            return written.decode()
    return json.dumps(line, default=default, separators=(",", ":"))


def _readable() -> structlog.types.Processor:
    """Return a renderer for terminals, which escapes control characters."""
    render = structlog.dev.ConsoleRenderer(
        colors=False, pad_event_to=30, exception_formatter=structlog.dev.plain_traceback, sort_keys=False
    )

    def rendered(log: Any, method: str, event: structlog.types.EventDict) -> str:
        del event["logger"]
        moment, shown = str(event.pop("timestamp")), {name: _shown(value) for name, value in event.items()}
        return str(render(log, method, {**shown, "timestamp": moment[11:19]}))

    return rendered


def _shown(value: Any) -> Any:
    return visible(value, keep="\n") if isinstance(value, str) else value


def logger(name: str) -> structlog.stdlib.BoundLogger:
    bound: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return bound
