"""Cost of following training logs, and seconds from a line to its finding in Redis.

The agent is a process of its own, with the shipped rules, next to one that reads no logs. Each file gets a line per
second, like ranks' logs; at random moments one of them gets a line that a rule takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import redis

from benchmarks.agent_idle import SETTLING, memory, processor_seconds
from benchmarks.alert_storm import redis_server
from tests.support.log_node import LogNode
from tests.support.programs import ROOT
from trainmedic.wire.findings import FIELD, FINDINGS
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.lines.rule import LogRule, RuleSet
from trainmedic_logs.rules import log_rule_library

STEP = "step {step}: loss 2.{step:04d} grad_norm 0.42 lr 1.5e-05 tokens/s 78400 memory 71.2 GB\n"
TAKEN = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}.00 GiB. GPU 0 has a total capacity of\n"


def shipped_rules() -> RuleSet:
    placed = [
        rule for path in sorted((ROOT / "logs/trainmedic_logs/logrules").glob("*.yaml")) for rule in _rules_of(path)
    ]
    return RuleSet(tuple(placed))


def _rules_of(path: Path) -> list[LogRule]:
    return [each.rule for each in log_rule_library.load_file(path).rules]


class Measured:
    """Memory, processor share, and seconds of each finding."""

    def __init__(self, node: LogNode, files: list[Path], options: argparse.Namespace) -> None:
        self._node = node
        self._files = files
        self._rng = random.Random(1)
        self._lines = options.lines
        self._step = 0
        self.waits: list[float] = []
        pid = node.agent.process.pid
        self.steps(SETTLING)
        pids = [pid, *node.reader_pids()]
        began, used = time.monotonic(), sum(map(processor_seconds, pids))
        for _ in range(options.findings):
            self.steps(self._rng.uniform(0.5, 1.5))
            if files:
                self.waits.append(self.one_finding())
        took = time.monotonic() - began
        self.share = (sum(map(processor_seconds, pids)) - used) / took
        self.memory = memory(pid)
        self.of_reading = [memory(each) for each in pids[1:]]

    def steps(self, seconds: float) -> None:
        """Write a training's lines for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for path in self._files:
                with path.open("a") as file:
                    file.write("".join(STEP.format(step=self._step + line) for line in range(self._lines)))
            self._step += self._lines
            time.sleep(min(max(until - time.monotonic(), 0.0), 1.0))

    def one_finding(self) -> float:
        """Return the seconds from a written line to its finding."""
        path = self._rng.choice(self._files)
        with redis.Redis.from_url(self._node.url) as client:
            known = {entry for entry, _ in client.xrange(FINDINGS)}
            began = time.monotonic()
            with path.open("a") as file:
                file.write(TAKEN.format(size=self._step))
            while time.monotonic() < began + 30:
                fresh = [fields for entry, fields in client.xrange(FINDINGS) if entry not in known]
                if any(finding_codec.decode(fields[FIELD]).finding.rule == "cuda-oom" for fields in fresh):
                    return time.monotonic() - began
                time.sleep(0.005)
        raise TimeoutError("the finding did not come")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--lines", type=int, default=1, help="in each file and second")
    parser.add_argument("--findings", type=int, default=20)
    options = parser.parse_args()
    rules = shipped_rules()
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as url:
        top = Path(name)
        with LogNode(top / "without", url, has_logs=False) as node:
            without = Measured(node, [], options)
        (top / "logs").mkdir()
        with LogNode(top / "with", url, files=[f"{top}/logs/{{job}}-rank-{{rank}}.log"]) as node:
            node.hand_out(rules)
            node.has_rules(rules)
            files = [top / "logs" / f"job-{number}-rank-{number}.log" for number in range(options.files)]
            reading = Measured(node, files, options)
    print(
        f"{options.files} files, {options.lines} lines each a second, {len(rules.rules)} rules:"
        f" agent {reading.memory['VmRSS']:.1f} MB resident,"
        f" {reading.memory['VmRSS'] / without.memory['VmRSS']:.2f} times the"
        f" {without.memory['VmRSS']:.1f} MB of an agent that reads no logs; {100 * reading.share:.2f} % of a core"
        f" ({100 * without.share:.2f} % without)"
    )
    parts = [f"{each['VmRSS']:.1f} MB, {each['Pss']:.1f} MB with shared pages divided" for each in reading.of_reading]
    print(f"opener and reader: {'; '.join(parts)}")
    print(
        f"from line to finding in Redis: {statistics.median(reading.waits):.2f} s in the median, at most"
        f" {max(reading.waits):.2f} s ({len(reading.waits)} findings in files that are being written)"
    )


if __name__ == "__main__":
    main()
