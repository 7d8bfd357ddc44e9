"""The reference of the agent's metrics is complete, and names none that does not exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from prometheus_client.metrics_core import Metric

from tests.driver.driver import Driver
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.exporter import AgentCollector
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.health import health_metrics
from trainmedic_agent.health.record import HealthRecord
from trainmedic_agent.journal import Journal
from trainmedic_agent.log_link.metric_families import reader_families
from trainmedic_agent.log_reading import log_metrics
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.log_shipping.ship_counters import ShipCounters
from trainmedic_agent.ports.gpus import THROTTLE_REASONS

REFERENCE = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()


def test_the_reference_lists_exactly_the_existing_metrics(
    make_driver: Callable[..., Driver], gpu_record: GpuRecord, tmp_path: Path
) -> None:
    """Each metric has its row with its type, and each row its metric."""
    make_driver(1)
    gpus = NvmlGpus()
    counters = LogCounters()

    def families_of_logs() -> Iterator[Metric]:
        yield from log_metrics.families(counters, dict)
        yield from reader_families(is_up=True, restarts=0, clock_error=0.001, uid=2_100_000_017)

    collector = AgentCollector(gpus, dict, AgentCounters(), {"node": "n1"}, gpu_record, families_of_logs)
    with closing(Journal(tmp_path / "health")) as journal:
        families = [*collector.collect(), *ShipCounters().families(), *health_metrics.families(HealthRecord(journal))]
    gpus.close()
    suffix = {"counter": "_total", "info": "_info"}
    offered = {
        f"{family.name}{suffix.get(family.type, '')}": family.type.replace("info", "gauge") for family in families
    }
    rows = re.findall(r"^\| (`[a-z].*?) \| (\w*)", REFERENCE, re.MULTILINE)
    documented = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    assert documented == offered


def test_the_reference_has_every_throttle_reason() -> None:
    """It has the name that the label has."""
    assert all(f"`{reason}`" in REFERENCE for reason in THROTTLE_REASONS.values())
