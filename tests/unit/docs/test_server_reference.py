"""The references of the server's metrics and of its events are complete, and name nothing that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import event_tables
from trainmedic_server import telemetry
from trainmedic_server.domain.event_codec import DECIDED, names
from trainmedic_server.domain.event_kinds import OfDecision
from trainmedic_server.domain.run import Decision

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"
METRICS = (REFERENCE / "server-metrics.md").read_text()


def test_the_reference_lists_exactly_the_existing_metrics() -> None:
    """Each has its type and its labels."""
    metrics = telemetry.Metrics()
    suffix = {"counter": "_total"}
    offered = {f"{family.name}{suffix.get(family.type, '')}": family.type for family in metrics.registry.collect()}
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", METRICS, re.MULTILINE)
    assert {name: kind for name, kind, _ in rows} == offered
    labels = {name: tuple(re.findall(r"`(\w+)`", cell)) for name, _, cell in rows}
    of_jobs = {f"trainmedic_job_{what}": ("job_name",) for what in ("gone", "failures_total", "restarts_total")}
    of_jobs["trainmedic_job_gpu"] = ("job_name", "gpu_node", "uuid")
    held = [each for each in vars(metrics).values() if hasattr(each, "_labelnames")]
    suffixed = {f"{each._name}{suffix.get(each._type, '')}": tuple(each._labelnames) for each in held}
    assert labels == {**suffixed, **of_jobs}


def test_the_reference_lists_exactly_the_existing_event_kinds() -> None:
    """Its tables are those that `tests.support.event_tables` makes."""
    assert event_tables.page() == event_tables.PAGE.read_text(encoding="utf-8")


def test_each_decision_is_a_kind_of_event() -> None:
    """The exception is `duplicate`, which the history does not record."""
    assert names(OfDecision) == {str(decision) for decision in Decision} - {"duplicate"}
    assert DECIDED.keys() == set(Decision) - {Decision.DUPLICATE, Decision.JOINED}
