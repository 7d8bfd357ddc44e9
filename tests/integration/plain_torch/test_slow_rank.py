"""A rank that is slow is named, whatever it is slow in: real ranks, their metrics, and the alert rule in promtool."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.rank_processes import RankProcesses
from trainmedic.job import progress

PROGRAM = Path(__file__).with_name("slow_rank_training.py")
RULES = Path(__file__).parents[3] / "monitoring" / "rules" / "training.yaml"
RANKS = 3
STEPS = 30  # of which the last 20 reports count

Metrics = dict[tuple[str, str | None], float]
"""By name, and rank where the metric has one."""


async def scraped(job: RankProcesses) -> tuple[Metrics, str]:
    """The metrics after some steps, when all ranks are known, and their text."""
    async with asyncio.timeout(90), httpx.AsyncClient() as client:
        while True:
            assert job.processes[0].poll() is None, job.log()
            if (job.directory / "port").exists():
                text = (await client.get(f"http://127.0.0.1:{(job.directory / 'port').read_text()}/metrics")).text
                samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
                metrics = {(sample.name, sample.labels.get("rank")): sample.value for sample in samples}
                named = [key for key in metrics if key[0] == "training_rank_data_seconds"]
                if metrics["training_steps_total", None] >= STEPS and len(named) == RANKS:
                    return metrics, text
            await asyncio.sleep(0.2)


def slowest(metrics: Metrics, name: str) -> str | None:
    return max((key for key in metrics if key[0] == name), key=metrics.__getitem__)[1]


def ranks_alerted(text: str, directory: Path) -> list[str]:
    """The ranks that TrainingStraggler names where Prometheus reads this for ten minutes."""
    series = [
        {"series": line.rsplit(" ", 1)[0], "values": f"{line.rsplit(' ', 1)[1]}+0x40"}
        for line in text.splitlines()
        if line.startswith("training_")
    ]
    ranks = [str(rank) for rank in range(RANKS)]
    alerted = []
    for rank in ranks:
        expression = f'count(ALERTS{{alertname="TrainingStraggler", alertstate="firing", rank="{rank}"}}) or vector(0)'
        probe = {"expr": expression, "eval_time": "9m", "exp_samples": [{"value": 1}]}
        tests = [{"interval": "15s", "input_series": series, "promql_expr_test": [probe]}]
        file = directory / f"rank-{rank}.yaml"
        file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests}))
        run = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
        assert "SUCCESS" in run.stdout or "got:" in run.stdout + run.stderr, run
        if run.returncode == 0:
            alerted.append(rank)
    return alerted


@pytest.mark.parametrize(
    ("kind", "part", "slow"),
    [pytest.param("ddp", "data", "2", marks=pytest.mark.long), ("buffers", "compute", "0"), ("fsdp", "data", "1")],
)
async def test_the_slow_rank_has_the_most_time_of_its_own(kind: str, part: str, slow: str, job: RankProcesses) -> None:
    """The others wait for it at sums of gradients, its buffers or its shards. The alert names it alone."""
    job.torchrun(RANKS, str(PROGRAM), kind, part, slow)
    metrics, text = await scraped(job)
    assert slowest(metrics, "training_rank_own_seconds") == slow
    assert metrics["training_rank_own_seconds", slow] > 1.3 * metrics["training_own_median_seconds", None]
    assert metrics["training_wait_seconds", None] > 0.03
    assert (slowest(metrics, "training_rank_data_seconds") == slow) or part != "data"
    assert ranks_alerted(text, job.directory) == [slow]


def test_the_parts_of_a_step_add_up_to_the_whole(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of one rank waits for nothing; all time but that for data is computation."""
    monkeypatch.setattr(progress, "REPORT_INTERVAL", 0.0)  # these steps are quicker than any
    training = begin()
    training.train(12)
    parts = training.run.training.medic.progress.pace.parts()
    assert parts.wait == 0.0
    assert 0.0 < parts.data < parts.own
    assert parts.compute > 0.0
