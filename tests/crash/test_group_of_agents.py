"""A group of GPUs at simulated agents: the server is killed in each batch and during the undos."""

from __future__ import annotations

from pathlib import Path

from benchmarks import group_agents
from benchmarks.fleet_members import GPUS


def test_each_gpu_is_capped_once_and_reverted_once(tmp_path: Path) -> None:
    """Commands in flight at each kill are sent again under their IDs, which the agents recognize."""
    seen = group_agents.measured(tmp_path, nodes=2, serial="50%")
    assert seen.message == f"{2 * GPUS} members: {2 * GPUS} succeeded"
    assert seen.deaths == 3
    assert seen.is_exact(2 * GPUS), seen.acts
