"""A replay of recorded alerts: alerts per second of one core, and peak memory with a tenth of them and with all.

    PYTHONPATH=.:app:sdk python benchmarks/replay.py [--alerts 1000000]

The record is of thirty days and 12,500 nodes. A third of the alerts concerns no playbook, a third has recorded runs of
the replayed playbook, and a third concerns one that did not exist then. The command reads the files from disk. The rate
is also relative to ``json.loads`` of the same lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.support.programs import PYTHON_PATH, ROOT, inherited
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
DAYS, NODES = 30, 12_500
OLD = """\
playbook: cool
on: {alert: GPUTemperatureHigh, matchers: ['severity=~"warning|critical"']}
target: gpu
guards: {cooldown: 10m, max_concurrent: 50}
steps:
  - {action: gpu.power_limit, with: {percent: 80}, undo: on_resolve}
  - {wait_for: resolved, timeout: 5m}
"""
NEW = """\
playbook: watch
on: {alert: NodeMemoryLow}
target: node
guards: {cooldown: 1h, max_runs: {count: 2000, per: 1d}}
steps:
  - {action: notify, with: {message: "{{ target.node }}"}}
  - {wait_for: resolved, timeout: 20m}
"""
NAMES = ("GPUTemperatureHigh", "NodeMemoryLow", "KubePodCrashLooping")


def items(count: int) -> Iterator[dict[str, Any]]:
    version = loader.load_one(OLD, "cool.yaml", registry.specs_only()).version
    for number in range(count):
        at = BEGINNING + timedelta(days=DAYS) * number / count
        end, node = at + timedelta(minutes=4), f"node-{number * 7919 % NODES}"
        name, run_id = NAMES[number % 3], f"{number:032x}"
        labels = {"alertname": name, "severity": "critical", "node": node, "gpu": str(number % 8), "cluster": "east"}
        reaction = {"playbook": "cool", "decision": "started", "reason": "", "run_id": run_id}
        yield {
            "alert_name": name, "labels": labels, "annotations": {"summary": f"{name} on {node}"}, "status": "resolved",
            "fingerprint": f"{number:016x}", "starts_at": (at - timedelta(seconds=30)).isoformat(),
            "first_heard": at.isoformat(), "last_heard": end.isoformat(), "count": 2, "resolved_at": end.isoformat(),
            "reacted": number % 3 == 0, "reason": "", "reactions": [reaction] if number % 3 == 0 else [],
        }  # fmt: skip
        if number % 3 == 0:
            yield {
                "run_id": run_id, "timestamp": at.isoformat(), "playbook": "cool", "mode": "enforce",
                "status": "succeeded", "decision": "started", "target": f"gpu:{node}/{number % 8}",
                "duration_ms": 240_000, "touched": [node], "started_by": None, "version": version,
            }  # fmt: skip


def write(folder: Path, count: int) -> Path:
    path = folder / f"{count}.ndjson"
    with path.open("w") as file:
        file.writelines(json.dumps(item) + "\n" for item in items(count))
    return path


def replay(path: Path, playbooks: Path) -> tuple[float, int, dict[str, Any]]:
    """Return processor seconds, peak memory in bytes, and the document."""
    argv = [sys.executable, "-m", "trainmedic_server", "playbook", "replay", "--from", str(path)]
    argv += ["--playbooks", str(playbooks), "--nodes", str(NODES), "--gpus-per-node", "8", "--output", "json"]
    process = subprocess.Popen(
        argv, cwd=ROOT, env={**inherited(), "PYTHONPATH": PYTHON_PATH}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    document = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, document


def seconds_to_parse(path: Path) -> float:
    began = time.process_time()
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alerts", type=int, default=1_000_000)
    count = parser.parse_args().alerts
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        playbooks = folder / "playbooks"
        playbooks.mkdir()
        (playbooks / "cool.yaml").write_text(OLD)
        (playbooks / "watch.yaml").write_text(NEW)
        _, of_a_tenth, _ = replay(write(folder, count // 10), playbooks)
        path = write(folder, count)
        seconds, peak, document = replay(path, playbooks)
        parsing = seconds_to_parse(path)
    assert document["alerts"] == count
    megabytes = f"{of_a_tenth / 1e6:.0f} MB with {count // 10:,} alerts, {peak / 1e6:.0f} MB with all"
    print(
        f"replay: {count / seconds:.0f} alerts a second and core of {count:,}, {seconds / parsing:.1f} times json.loads"
    )
    print(f"peak memory: {megabytes}")
    for each in document["playbooks"]:
        print(f"{each['playbook']}: {each['same']} same, {each['different']} different, {each['not_known']} not known")


if __name__ == "__main__":
    main()
