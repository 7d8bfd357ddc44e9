"""The alert map with a real Alertmanager, a server that is killed, and the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live import Server
from tests.support.programs import PYTHON_PATH, alertmanagers, eventually, inherited, start_alertmanager

PLAYBOOK = """
playbook: watch
on: {alert: [NodeSick, GPUTemperatureHigh]}
target: node
steps:
  - {id: over, wait_for: resolved, timeout: 1h}
"""
MAP = """
accept: ['site="alpine"']
rename:
  - alert: [HostFeverish, HostCold]
    as: NodeSick
    labels: {node: "{{ labels.box }}"}
    drop: [instance]
"""
CONFIG = """
route: {{receiver: trainmedic, group_by: ['...'], group_wait: 0s, group_interval: 1s, repeat_interval: 2s}}
receivers:
  - name: trainmedic
    webhook_configs: [{{url: "http://127.0.0.1:{port}/webhook", send_resolved: true}}]
"""


class Site:
    """A server with an alert map, and an Alertmanager that posts to it."""

    def __init__(self, server: Server, path: Path, alertmanager: str) -> None:
        self.server, self.map, self.alertmanager = server, path, alertmanager
        self.began = datetime.now(UTC) - timedelta(minutes=1)
        """Before any end that a test posts: Alertmanager refuses an alert that ends before it starts."""

    def post(self, ends_in: timedelta, **labels: str) -> None:
        alert = {
            "labels": labels,
            "startsAt": self.began.isoformat(),
            "endsAt": (datetime.now(UTC) + ends_in).isoformat(),
            "generatorURL": "http://prom:9090/graph?g0.expr=DCGM_FI_DEV_GPU_TEMP+%3E+80",
        }
        httpx.post(f"{self.alertmanager}/api/v2/alerts", json=[alert]).raise_for_status()

    def command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "trainmedic_server", *words, "--server", f"http://127.0.0.1:{self.server.port}"],
            env={**inherited(), "PYTHONPATH": PYTHON_PATH},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def by_decision(self) -> dict[str, dict[str, Any]]:
        return {run["decision"]: run for run in self.server.runs()}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    path = tmp_path / "site.yaml"
    path.write_text(MAP)
    config = tmp_path / "alertmanager.yml"
    server = Server(tmp_path / "server", PLAYBOOK, "--alert-map", str(path))
    config.write_text(CONFIG.format(port=server.port))
    with server:
        program, url = start_alertmanager(alertmanagers()["installed"], config, tmp_path / "am")
        with program:
            yield Site(server, path, url)


def test_an_alert_of_this_site_runs_and_one_of_another_is_recorded(site: Site) -> None:
    """After a kill and a map change the end of the original ends the run; both names find it."""
    hour = timedelta(hours=1)
    labels = {"alertname": "HostFeverish", "box": "gpu-31", "instance": "exporter:9100"}
    site.post(hour, **labels, site="alpine")
    site.post(hour, **labels, site="coast")
    eventually(lambda: {"started", "not_accepted"} <= site.by_decision().keys(), 60, "both decisions")
    started, refused = (site.by_decision()[name] for name in ("started", "not_accepted"))
    assert (started["target"], started["alert_name"], started["original_alert_name"]) == (
        "node:gpu-31", "NodeSick", "HostFeverish"
    )  # fmt: skip
    assert started["original_labels"] == {**labels, "site": "alpine"}
    assert started["alert_labels"] == {
        "alertname": "NodeSick", "box": "gpu-31", "node": "gpu-31", "site": "alpine"
    }  # fmt: skip
    assert (refused["target"], refused["status"]) == (None, "not_started")
    assert "'site' is 'coast' and must be 'alpine'" in refused["message"]

    site.map.write_text("accept: ['site=\"nowhere\"']")
    site.server.kill()
    site.server.start()
    site.post(timedelta(seconds=-1), **labels, site="alpine")
    over = eventually(
        lambda: next((run for run in site.server.runs() if run["status"] == "succeeded"), None), 60, "the run's end"
    )
    assert over["run_id"] == started["run_id"]
    for name in ("NodeSick", "HostFeverish"):
        items = site.server.ask(f"/history?alertname={name}").body["items"]
        assert started["run_id"] in [item["run_id"] for item in items]
    assert "mapped from  HostFeverish" in site.command("history", "show", started["run_id"])
    told = site.command("why", "--alert", "HostFeverish", "--label", "site=alpine")
    assert "mapped from HostFeverish: " in told
    assert "not accepted by the alert map" in told or "decision: not_accepted" in told


def test_a_broken_map_keeps_the_good_one_and_is_reported(site: Site) -> None:
    """/ready, /playbooks and status report it; a fixed map is loaded without a restart."""
    assert site.server.ask("/ready").body["alert_map"]["ok"] is True
    site.map.write_text("rename: [{alert: A, az: B}]")
    broken = eventually(
        lambda: (state := site.server.ask("/ready").body["alert_map"])["ok"] is False and state, 60, "the mistake told"
    )
    assert "1 condition, 1 error: see /playbooks" in broken["detail"]
    assert site.server.ask("/ready").status == 200
    (error,) = site.server.ask("/playbooks").body["errors"]
    assert (error["file"], error["line"]) == (str(site.map), 1)
    assert "alert map    NOT OK" in site.command("status")
    site.post(timedelta(hours=1), alertname="HostCold", box="gpu-4", site="alpine")
    eventually(lambda: "started" in site.by_decision(), 60, "a run by the good map")
    site.map.write_text(MAP.replace("alpine", "coast"))
    eventually(lambda: site.server.ask("/ready").body["alert_map"]["ok"], 60, "the mended map")
    site.post(timedelta(hours=1), alertname="HostCold", box="gpu-5", site="coast")
    eventually(lambda: len([run for run in site.server.runs() if run["decision"] == "started"]) == 2, 60, "another run")


def test_an_unknown_alert_comes_with_the_entry_that_would_rename_it(site: Site) -> None:
    """The metric of its rule determines the entry, which the API and the text output show."""
    site.post(timedelta(hours=1), alertname="Alarm 4711", gpu="2", node="gpu-8", site="alpine")
    item = eventually(
        lambda: next(iter(site.server.ask("/alerts?reacted=false").body["items"]), None), 60, "the alert heard"
    )
    assert item["suggestion"]["alert_name"] == "GPUTemperatureHigh"
    assert item["suggestion"]["rename"] == "rename:\n  - alert: 'Alarm 4711'\n    as: GPUTemperatureHigh\n"
    assert [each["playbook"] for each in item["suggestion"]["playbooks"]] == ["watch"]
    told = site.command("why", "--alert", "Alarm 4711")
    assert "its rule reads dcgm_fi_dev_gpu_temp" in told
    assert "- alert: 'Alarm 4711'" in told
    assert "then watch reacts, if its conditions hold" in told


def test_a_map_that_was_never_loaded_blocks_all_actions(tmp_path: Path) -> None:
    """The server starts, is not ready and gives the reason; it records alerts, and acts once the file is fixed."""
    path = tmp_path / "site.yaml"
    path.write_text("accept: [")
    with Server(tmp_path / "server", PLAYBOOK, "--alert-map", str(path)) as server:
        ready = server.ask("/ready")
        assert (ready.status, ready.body["alert_map"]["ok"]) == (503, False)
        assert ready.body["alert_map"]["detail"].startswith("no alert is accepted: ")
        alert = {
            "status": "firing",
            "labels": {"alertname": "NodeSick", "node": "gpu-12"},
            "annotations": {},
            "startsAt": datetime.now(UTC).isoformat(),
        }
        body = {"version": "4", "groupKey": "g", "receiver": "r", "status": "firing", "alerts": [alert]}
        (decided,) = server.ask("/webhook", body).body["runs"]
        assert (decided["decision"], decided["target"]) == ("not_accepted", None)
        path.write_text("accept: ['node=~\"gpu-.*\"']")
        eventually(lambda: server.ask("/ready").status == 200, 60, "the mended map")
        assert [each["decision"] for each in server.ask("/webhook", body).body["runs"]] == ["started"]
