"""A user who fills the log directory with names, empty files, floods and dumps, beside a normal job."""

from __future__ import annotations

import time
from pathlib import Path

from tests.attack.effort import trials
from tests.support.hostile_logs import HostileJobs
from tests.support.log_node import LogNode
from tests.support.process_use import MIB, process_use
from tests.support.programs import eventually
from trainmedic.wire.log_layout import AttemptLogs

SHARE = trials(1, 20)
"""Twentieths of the whole load: 200 sources files, 210,000 empty files and 500 floods."""
SECONDS = trials(10, 600)
GROWTH = 96
"""MiB. The agent's default limit is 128 MiB; it has some 60 before."""


def test_a_hostile_user_hides_no_finding_and_fills_no_memory(tmp_path: Path, redis_url: str) -> None:
    """Each line of the normal job becomes a finding, and the agent reports what it leaves out of the hostile ones."""
    root = tmp_path / "logs"
    root.mkdir()
    with LogNode(tmp_path / "node", redis_url, roots=[str(root)], max_job_files=20) as node:
        node.hand_out()
        node.has_rules()
        before = process_use(node.agent.process.pid).resident
        hostile = HostileJobs(root, node.name, sources=10 * SHARE, empty=10_500 * SHARE, floods=25 * SHARE, names=64)
        hostile.make()
        with hostile:
            ends, mark = time.monotonic() + SECONDS, 0
            while mark < 2 or time.monotonic() < ends:
                mark += 1
                path = AttemptLogs.of(root, f"normal-{mark // 2}", 1).launcher(node.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(f"MARK {mark}\n")
                node.found(mark, within=120)
        assert process_use(node.agent.process.pid).resident - before < GROWTH * MIB
        eventually(lambda: has_cuts(node.metrics()), 120, "a cut in the metrics")


def has_cuts(metrics: str) -> bool:
    """Whether a budget has left something out. A reader that is busy answers a scrape without its metrics."""
    lines = [line for line in metrics.splitlines() if line.startswith("trainmedic_agent_log_cuts_total")]
    return any(not line.endswith(" 0.0") for line in lines)
