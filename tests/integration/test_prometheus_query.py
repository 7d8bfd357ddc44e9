"""``prometheus.query`` and the queries of waits against a real Prometheus, with labels that would break a query."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.past_prometheus import Past
from tests.support.programs import free_port, start_prometheus
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.actions import registry
from trainmedic_server.actions.prometheus import PrometheusQuery, PrometheusQueryParams
from trainmedic_server.adapters.prometheus_api import PrometheusApi
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.catalog import loader
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.ports.actions import Call, Services

ODD = 'no"de-1\\{}'
PLAYBOOK = """
playbook: quiet
on: {alert: Idle}
target: node
steps:
  - {wait_for: {query: 'max(busy{node="{{ labels.node }}"}) < LIMIT'}, timeout: 1h}
"""


async def test_partial_answers_of_a_real_prometheus_pass_no_wait(tmp_path: Path) -> None:
    """An empty answer would mean that nothing is broken."""
    now = datetime.now(UTC).replace(microsecond=0)
    past = Past(now - timedelta(minutes=5), 10 * 60)
    past.add("broken", 0.0, node="node-1")
    config = tmp_path / "prometheus.yml"
    remote = f"{{url: 'http://127.0.0.1:{free_port()}/read', read_recent: true}}"
    config.write_text(f"{{global: {{scrape_interval: 1h}}, remote_read: [{remote}]}}\n")
    past.into(tmp_path / "prometheus" / "data", tmp_path)
    program, url = start_prometheus(config, tmp_path / "prometheus")
    prometheus, unused = PrometheusApi(url), Any
    action = PrometheusQuery(Services(SystemClock(), unused, unused, metrics=prometheus))  # type: ignore[arg-type]
    params = PrometheusQueryParams(query="broken == 1")
    alert = Alert("f", AlertStatus.FIRING, {"alertname": "Idle"}, {}, now)
    call = Call("c", "r", "p", Target(TargetKind.NODE, node="n"), params, "Idle", now, now, alert)
    with program, pytest.raises(errors.TemporaryFailure, match=r"only in part: .*refused"):
        await action.perform(call)
    await prometheus.close()


async def test_a_real_prometheus_answers_the_query_of_a_wait(tmp_path: Path) -> None:
    """The value is that of the exact series, whatever its label holds; a value that does not pass is given too."""
    now = datetime.now(UTC).replace(microsecond=0)
    past = Past(now - timedelta(minutes=5), 10 * 60)
    past.add("busy", lambda _: 42.0, node=r"no\"de-1\\{}")
    past.add("busy", lambda _: 1.0, node="node-2")
    config = tmp_path / "prometheus.yml"
    config.write_text("global: {scrape_interval: 1h}\n")
    past.into(tmp_path / "prometheus" / "data", tmp_path)
    program, url = start_prometheus(config, tmp_path / "prometheus")
    prometheus, unused = PrometheusApi(url), Any
    action = PrometheusQuery(Services(SystemClock(), unused, unused, metrics=prometheus))  # type: ignore[arg-type]
    alert = Alert("f", AlertStatus.FIRING, {"alertname": "Idle", "node": ODD}, {}, now)

    async def ask(params: Any) -> Any:
        target = Target(TargetKind.NODE, node="n")
        return await action.perform(Call("c", "r", "p", target, params, "Idle", now, now + timedelta(minutes=1), alert))

    def query(limit: int) -> Any:
        text = PLAYBOOK.replace("LIMIT", str(limit))
        return loader.load_one(text, "p.yaml", registry.specs_only()).params("steps", 0, {"labels": alert.labels})

    with program:
        passing, other = await ask(query(50)), await ask(query(30))
        assert (passing["value"], passing["count"]) == (42, 1)
        assert (other["value"], other["series"], other["compared"]) == (None, [], 42)
        series = (await ask(PrometheusQueryParams(query="busy")))["series"]
        assert {each["labels"]["node"]: each["value"] for each in series} == {ODD: 42, "node-2": 1}
        with pytest.raises(errors.PermanentFailure, match="status 400"):
            await ask(PrometheusQueryParams(query="busy{"))
    await prometheus.close()
