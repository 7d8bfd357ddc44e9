"""What the server tells of itself: Prometheus metrics and JSON log lines.

Metrics are one object that wiring makes and hands in, so that two servers in one process (as in
tests) do not share counters. Log lines are made with structlog; ``run_id`` is bound to the context
of whoever works on a run. Neither carries parameters, bodies, URLs or tokens.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """The server's metrics, on a registry of their own. Durations are in seconds."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.alerts = Counter("trainmedic_alerts", "Alerts received, by status.", ["status"], registry=registry)
        self.deliveries = Counter(
            "trainmedic_deliveries", "Webhook deliveries, by outcome.", ["outcome"], registry=registry
        )
        self.truncated = Counter(
            "trainmedic_truncated_alerts", "Alerts that Alertmanager left out of a delivery.", registry=registry
        )
        self.decisions = Counter(
            "trainmedic_decisions", "Decisions, by playbook and reason.", ["playbook", "reason"], registry=registry
        )
        self.runs = Counter(
            "trainmedic_runs", "Runs that closed, by playbook and outcome.", ["playbook", "status"], registry=registry
        )
        self.undos = Counter("trainmedic_undos", "Undo duties, by outcome.", ["status"], registry=registry)
        self.step_seconds = Histogram(
            "trainmedic_step_seconds",
            "Time of an action's attempt.",
            ["action", "outcome"],
            buckets=_LATENCY,
            registry=registry,
        )
        self.alert_to_action_seconds = Histogram(
            "trainmedic_alert_to_action_seconds",
            "From receipt of an alert to its run's first act.",
            buckets=_LATENCY,
            registry=registry,
        )
        self.webhook_seconds = Histogram(
            "trainmedic_webhook_seconds", "From a delivery's receipt to its reply.", buckets=_LATENCY, registry=registry
        )
        self.queue_depth = Gauge("trainmedic_queue_depth", "Deliveries that wait for admission.", registry=registry)
        self.open_runs = Gauge("trainmedic_open_runs", "Runs that are open.", registry=registry)
        self.undos_owed = Gauge("trainmedic_undos_owed", "Runs that still owe an undo.", registry=registry)
        self.leases = Gauge("trainmedic_leases", "Effects that last only while they are renewed.", registry=registry)
        self.lease_renewals = Counter(
            "trainmedic_lease_renewals", "Renewals of leases asked for, by outcome.", ["outcome"], registry=registry
        )
        self.leases_lost = Counter(
            "trainmedic_leases_lost", "Leases that ran out while they were still wanted.", registry=registry
        )
        self.leases_set_again = Counter(
            "trainmedic_leases_set_again",
            "Effects whose lease had run out that were brought about again.",
            registry=registry,
        )
        self.store_errors = Counter("trainmedic_store_errors", "Failed calls of the run store.", registry=registry)
        self.bus_errors = Counter("trainmedic_bus_errors", "Failed calls of Redis.", registry=registry)
        self.loop_errors = Counter(
            "trainmedic_loop_errors", "Unexpected errors that a background loop survived.", ["loop"], registry=registry
        )
        self.refused_messages = Counter(
            "trainmedic_refused_messages",
            "Replies that could not be read or belonged to no run.",
            ["reason"],
            registry=registry,
        )
        self.working = Gauge(
            "trainmedic_working", "1 while this server works, 0 while it stands by for another.", registry=registry
        )
        self.paused = Gauge("trainmedic_paused", "1 while an operator has paused the server.", registry=registry)
        self.breaker_open = Gauge("trainmedic_breaker_open", "1 while the breaker is open.", registry=registry)
        self.playbooks_loaded = Gauge("trainmedic_playbooks_loaded", "Playbooks that are loaded.", registry=registry)
        self.playbook_errors = Gauge(
            "trainmedic_playbook_errors", "Playbook files that could not be loaded.", registry=registry
        )


def configure_logging(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send every log line, ours and the libraries', to `stream` (standard error) as one JSON object."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "alembic", "apprise", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module: ``log = telemetry.logger(__name__)``."""
    made: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return made
