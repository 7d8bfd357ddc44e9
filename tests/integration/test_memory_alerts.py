"""The shipped memory alerts, on what the SDK really measures and shows, along minutes that nobody waits for.

The clock is handed to the SDK; what it shows at each scrape is handed to promtool, which evaluates the shipped
rules over it. Not here: the rules on made-up values (``monitoring/rules``).
"""

from __future__ import annotations

import json
import mmap
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT
from trainmedic.job.metrics import JobCollector
from trainmedic.job.progress import Progress
from trainmedic.job.rank_stats import RankStats

RULES = ROOT / "monitoring" / "rules" / "training.yaml"
EVERY = 5
"""Seconds from one scrape to the next."""

Figures = Mapping[str, Any]


def shown(scrapes: int, train: Callable[[int], None], others: Callable[[int], Figures]) -> list[dict[str, Any]]:
    """The series that a job of two ranks shows: this process, and one with the figures of `others`."""
    progress = Progress()
    stats = RankStats(progress, "node-1")
    values: dict[str, list[str]] = {}
    for scrape in range(scrapes):
        now = float(scrape * EVERY)
        train(scrape)
        progress.add_report(scrape, 2.0, 0.5, None, 8, now)
        ranks = {0: stats.measure(now), 1: others(scrape)}
        families = JobCollector("llm-1", progress, lambda ranks=ranks: ranks, lambda now=now: now).collect()  # type: ignore[misc]
        for sample in (sample for family in families for sample in family.samples):
            if "memory" in sample.name or sample.name == "training_steps_total":
                labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
                line = values.setdefault(f"{sample.name}{{{labels}}}", [])
                line += ["_"] * (scrape - len(line)) + [repr(float(sample.value))]
    return [{"series": series, "values": " ".join(line)} for series, line in values.items()]


def fires(directory: Path, series: list[dict[str, Any]], at: int) -> list[str]:
    """The names of the alerts that fire on `series`, and their ``memory``, that many seconds from the beginning."""
    probe = {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{at}s", "exp_samples": []}
    tests = [{"interval": f"{EVERY}s", "input_series": series, "promql_expr_test": [probe]}]
    file = directory / "test.json"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "5s", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False, timeout=60)
    told = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in told, told
    return [part.partition('alertname="')[2] for part in told.splitlines() if 'alertname="' in part]


def new_memory(size: int) -> mmap.mmap:
    """Memory in use that this process had not before: what is merely allocated may be taken from what an earlier test
    has given back to the allocator."""
    block = mmap.mmap(-1, size)
    block.write(b"x" * size)
    return block


def idle(scrape: int) -> None:
    """A step that keeps nothing."""


@pytest.mark.parametrize("kept", [2_000_000, 0], ids=["two megabytes a step", "nothing"])
def test_a_loop_that_retains_memory_is_a_leak(tmp_path: Path, kept: int) -> None:
    """This process really retains memory; at that rate the fuller rank runs out of memory soon."""
    held: list[mmap.mmap] = []
    series = shown(
        scrapes=110,
        train=lambda scrape: held.append(new_memory(kept)) if kept else None,
        others=lambda scrape: {"host_used": 7.0e9, "host_limit": 8.0e9},
    )
    firing = fires(tmp_path, series, at=109 * EVERY)
    assert [name for name in firing if name.startswith("TrainingMemoryLeak")] == (firing if kept else [])
    assert bool(firing) is bool(kept)


def test_the_fullest_rank_is_under_pressure_until_it_has_free_memory_again(tmp_path: Path) -> None:
    """One rank of two is enough; after its cache is emptied the alert ends."""

    def others(scrape: int) -> Figures:
        return {"cuda_used": 76e9 if 12 <= scrape < 48 else 40e9, "cuda_limit": 80e9}

    series = shown(scrapes=100, train=idle, others=others)
    assert fires(tmp_path, series, at=11 * EVERY) == []
    [firing] = fires(tmp_path, series, at=30 * EVERY)
    assert firing.startswith("TrainingMemoryPressure")
    assert 'memory="cuda"' in firing
    assert fires(tmp_path, series, at=90 * EVERY) == []
