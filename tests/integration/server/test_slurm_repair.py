"""A training on two Slurm nodes, one of which breaks: checkpoint, move, drain, health check, return. Real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.slurm_repair import LEVERS, repaired

CASES = [
    (lever.name, release)
    for lever in LEVERS.values()
    for release in lever.releases
    if lever.name != "exit code"  # Slurm waits for two minutes: `benchmarks.slurm_levers` has it
]


@pytest.mark.parametrize(("lever", "release"), CASES)
def test_a_training_moves_off_a_broken_node_which_returns_after_a_check(
    lever: str, release: str, tmp_path: Path
) -> None:
    """The training resumes from its last checkpoint; the node stays drained until its health is checked."""
    repair = repaired(LEVERS[lever], release, tmp_path)
    assert repair.first_good["step"] > repair.saved_step > 0
    assert repair.out_until_checked
    assert repair.returned
    assert {run["status"] for run in repair.runs} == {"succeeded"}
    # Another run on the same job waits, also if it names the job by Slurm's ID.
    names = [tuple(run["also"]) for run in repair.runs if run["target"] == "job:llm-1"]
    assert set(names) == ({(f"job:slurm:{repair.job_id}",)} if LEVERS[lever].job is not None else set())
