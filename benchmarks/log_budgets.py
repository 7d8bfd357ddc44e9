"""How long a job's failing line takes to become a finding beside jobs that do all they can to blind the agent.

One user has sources files that name thousands of files, a directory of empty files, floods of lines, and dumps that
expand, all below the log directory of a normal job. The figures: the seconds from the normal job's line to its finding
in Redis, and the agent's resident memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.agent_idle import memory
from benchmarks.alert_storm import redis_server
from tests.support.hostile_logs import HostileJobs
from tests.support.log_node import LogNode
from trainmedic.wire.log_layout import AttemptLogs

LONGEST = 300.0


def seconds_to_finding(node: LogNode, job: Path, mark: int) -> float:
    """Seconds from a line that is written to its finding in Redis."""
    began = time.monotonic()
    job.parent.mkdir(parents=True, exist_ok=True)
    with job.open("a") as file:
        file.write(f"MARK {mark}\n")
    node.found(mark, within=LONGEST)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--share", type=float, default=1.0, help="of the hostile files: 0.1 makes a tenth of them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as url:
        top = Path(name)
        root = top / "logs"
        root.mkdir()
        with LogNode(top / "node", url, roots=[str(root)]) as node:
            node.hand_out()
            node.has_rules()
            before = memory(node.agent.process.pid)["VmRSS"]
            quiet = [_round(node, root, mark) for mark in range(5)]
            sizes = {"sources": 200, "empty": 210_000, "floods": 500}
            hostile = HostileJobs(
                root, node.name, **{name: max(int(most * options.share), 1) for name, most in sizes.items()}
            )
            hostile.make()
            with hostile:
                waits = [_round(node, root, 100 + mark) for mark in range(options.rounds)]
            after = memory(node.agent.process.pid)["VmRSS"]
    print(
        f"from line to finding in Redis: {statistics.median(waits):.2f} s in the median, at most {max(waits):.2f} s"
        f" beside hostile jobs of the same user ({statistics.median(quiet):.2f} s alone; {len(waits)} findings)"
    )
    print(f"memory of the agent: {before:.1f} MB before, {after:.1f} MB after, {after / before:.2f} times as much")


def _round(node: LogNode, root: Path, mark: int) -> float:
    """Every second finding is of a job that is new."""
    attempt = AttemptLogs.of(root, f"normal-{mark // 2}", 1)
    return seconds_to_finding(node, attempt.launcher(node.name), mark)


if __name__ == "__main__":
    main()
