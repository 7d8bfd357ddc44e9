"""`/ready` and ``trainmedic status`` show whether the real Prometheus and Alertmanager answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.support.programs import (
    PYTHON_PATH,
    alertmanagers,
    eventually,
    free_port,
    start_alertmanager,
    start_prometheus,
    start_server,
)


def parts(url: str) -> dict[str, Any]:
    ready = httpx.get(f"{url}/ready").raise_for_status().json()
    return {name: ready[name] for name in ("alertmanager", "prometheus")}


def test_a_wrong_url_is_shown_before_it_is_needed(tmp_path: Path) -> None:
    """Valid ones answer. A server without any shows none."""
    config, routes = tmp_path / "prometheus.yml", tmp_path / "alertmanager.yml"
    config.write_text("global: {scrape_interval: 1h}\n")
    routes.write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
    prometheus, metrics_url = start_prometheus(config, tmp_path / "prometheus")
    alertmanager, alerts_url = start_alertmanager(alertmanagers()["installed"], routes, tmp_path / "alertmanager")
    wrong = f"http://127.0.0.1:{free_port()}"
    with prometheus, alertmanager:
        server, url = start_server(tmp_path / "right", "--alertmanager", alerts_url, "--prometheus-url", metrics_url)
        with server:
            answers = {"ok": True, "detail": "answers", "caution": False}
            expected = {"alertmanager": answers, "prometheus": answers}
            eventually(lambda: parts(url) == expected, 60, "both answer")
        # Prometheus's address is no Alertmanager.
        server, url = start_server(tmp_path / "wrong", "--alertmanager", metrics_url, "--prometheus-url", wrong)
        with server:
            eventually(lambda: not any(part["ok"] for part in parts(url).values()), 60, "both are wrong")
            command = [sys.executable, "-m", "trainmedic_server", "status"]
            shown = subprocess.run(
                command, env={"PYTHONPATH": PYTHON_PATH, "TRAINMEDIC_URL": url}, capture_output=True, text=True
            )
    assert shown.returncode == 0, shown.stderr
    lines = {line.split()[0]: line for line in shown.stdout.splitlines() if line.startswith("  ")}
    assert "NOT OK: cannot be used since" in lines["alertmanager"]
    assert "status 404" in lines["alertmanager"]
    assert f"Prometheus does not answer: POST {wrong}: " in lines["prometheus"]
    server, url = start_server(tmp_path / "none")
    with server:
        assert parts(url) == {"alertmanager": None, "prometheus": None}
