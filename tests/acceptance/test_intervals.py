"""The faster clock of the acceptance tests changes durations and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.intervals import DURATION, hasten
from tests.support.programs import ROOT

MONITORING = ROOT / "monitoring"
SHIPPED = [
    *sorted((MONITORING / "rules").glob("*.yaml")),
    MONITORING / "prometheus.yml",
    MONITORING / "alertmanager.yml",
    ROOT / "playbooks" / "training-loss-spike.yaml",
    ROOT / "playbooks" / "gpu-temperature-high.yaml",
    ROOT / "playbooks" / "disk-space-low.yaml",
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_hastening_changes_all_durations_and_nothing_else(path: Path) -> None:
    """With durations blanked, the hastened file equals the shipped one; no duration was missed."""
    shipped = path.read_text()
    hastened = hasten(shipped, 15)
    assert re.sub(r"\b\d+ms\b", "…", hastened) == DURATION.sub("…", shipped)
    outside_comments = re.sub(r"#.*", "", shipped)
    assert len(DURATION.findall(shipped)) == len(re.findall(r"\b\d+[smhd]\b", outside_comments))


def test_durations_keep_their_proportions() -> None:
    """Five minutes become 20 seconds, 15 seconds become one second."""
    assert hasten("expr: avg_over_time(x[30m] offset 5m) < y[15s]", 15) == (
        "expr: avg_over_time(x[120000ms] offset 20000ms) < y[1000ms]"
    )


@pytest.mark.parametrize(("shipped", "kept"), [("15s", "15000ms"), ("2m", "15000ms"), ("20m", "80000ms")])
def test_an_alert_keeps_firing_for_the_usual_duration_of_a_repair(shipped: str, kept: str) -> None:
    """`keep_firing_for` is shortened only to the minimum that the caller requests, here 15 s."""
    text = f"  for: 15s\n  keep_firing_for: {shipped}\n"
    assert hasten(text, 15, least_keep_ms=15_000) == f"  for: 1000ms\n  keep_firing_for: {kept}\n"


def test_prometheus_accepts_the_hastened_rules(tmp_path: Path) -> None:
    """promtool reports no fault in them."""
    for path in sorted((MONITORING / "rules").glob("*.yaml")):
        (tmp_path / path.name).write_text(hasten(path.read_text(), 15))
        done = subprocess.run(["promtool", "check", "rules", tmp_path / path.name], capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
