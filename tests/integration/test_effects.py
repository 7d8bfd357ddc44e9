"""Measured effects against a real Prometheus: its rules, its past, and labels that would break a query."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import closed, heard
from tests.support.past_prometheus import Past
from tests.support.programs import Program, start_prometheus
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.prometheus_api import PrometheusApi
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.effect import Effect, EffectVerdict
from trainmedic_server.domain.run import Run
from trainmedic_server.engine.effects import EffectMeasuring

ODD = 'no"de-1\\{}'
RULES = """
groups:
  - name: gpu
    rules:
      - alert: Hot
        expr: temp > 85 or (temp > 80 and ignoring (alertname, alertstate, severity) ALERTS{alertname="Hot"})
        labels: {severity: critical}
      - alert: Hot
        expr: temp > 60
        labels: {severity: warning}
"""


def prometheus_with_rules(past: Past, directory: Path) -> tuple[Program, str]:
    """One that remembers `past` and has the rules above."""
    (directory / "rules.yml").write_text(RULES)
    config = directory / "prometheus.yml"
    config.write_text("global: {scrape_interval: 1h, evaluation_interval: 1h}\nrule_files: [rules.yml]\n")
    past.into(directory / "prometheus" / "data", directory)
    return start_prometheus(config, directory / "prometheus")


async def effect_of(store: InMemoryStore, run: Run) -> Effect:
    record = await store.record(run.id)
    assert record is not None
    assert record.effect is not None
    return record.effect


async def test_a_run_effect_is_measured_by_a_real_prometheus(tmp_path: Path) -> None:
    """The rule has the alert's labels; its series is the alert's, whatever the labels hold; a label that
    only the alert has, as external labels are, does not hide it; nonsense is refused for good."""
    acted = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=12)
    past = Past(acted - timedelta(minutes=12), 24 * 60)
    past.add("temp", lambda after: 70 if after < 600 else 88 if after <= 720 else 72, node=r"no\"de-1\\{}", gpu="0")
    past.add("temp", lambda _: 99.0, node="node-2", gpu="0")
    program, url = prometheus_with_rules(past, tmp_path)
    labels = {"alertname": "Hot", "node": ODD, "gpu": "0", "severity": "critical", "cluster": "outside"}
    store, run, wrong = InMemoryStore(), closed(0), closed(1)
    runs = [replace(each, alert_name="Hot", alert_labels=labels, acted_at=acted) for each in (run, wrong)]
    await store.transact(lambda tx: tx.save_alerts([heard()]))
    await store.transact(lambda tx: tx.add_runs(runs))
    due = [Effect(each.id, "cool", acted, acted) for each in runs]
    due[1] = Effect(wrong.id, "cool", acted, acted, query="temp{", origin="playbook", better="lower")
    await store.transact(lambda tx: tx.effects.save(due))
    prometheus = PrometheusApi(url)
    with program:
        measuring = EffectMeasuring(store, prometheus, SystemClock(), telemetry.Metrics())
        assert await measuring.measure() == 2
        known = await effect_of(store, run)
        assert (known.verdict, known.before, known.at, known.after, known.limit) == (
            EffectVerdict.HELPED,
            70,
            88,
            72,
            85,
        )
        assert len(known.series) == 41
        refused = await effect_of(store, wrong)
        assert refused.verdict is EffectVerdict.NOT_MEASURED
        assert "status 400" in (refused.reason or "")
        assert await prometheus.rules_of("Cold") == []
    with pytest.raises(errors.MetricsUnavailable):
        await prometheus.rules_of("Hot")
    await prometheus.close()
