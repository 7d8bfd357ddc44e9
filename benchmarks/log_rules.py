"""Lines per second and core with all shipped log rules, over ``grep`` with the same patterns on the same lines.

Four figures: a training's lines with all processing (decoding, prefixes, records, blocks, rules, findings); the same
without steps, which are mostly skipped; the rules alone on prepared lines; and a hostile line of 1 MB, per KB. For
comparison: ``grep -P`` with all patterns as one; Python's `re` with the patterns one after another, as in a simple log
agent; and mtail with a counter for each pattern, if named (``apt-get download mtail`` and ``dpkg -x`` unpack one
without installing it).

    python -m benchmarks.log_rules [--lines 200000] [--mtail mtail]
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.lines.assembly import LineAssembler
from trainmedic_logs.lines.matcher import LineMatcher
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.lines.tracker import FindingTracker
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_server import telemetry

FOLDER = Path(__file__).parents[1] / "logs/trainmedic_logs/logrules"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
QUIET = (
    "[2024-09-11 17:52:18,030] [INFO] [logging.py:96:log_dist] [Rank 0] step={0}, skipped=0, lr=[1e-05], mom=[0.9]",
    "node-{0}:533:1765 [2] NCCL INFO Channel 04/0 : 0[0] -> 32[0] [receive] via NET/IBext_v8/7 comm 0x7f{0} nRanks 64",
    "INFO:root:saving checkpoint at iteration {0} to /checkpoints/gpt, no error and no timeout",
    " 22%|##        | {0}/50000 [1:56:21<6:51:20,  6.83s/it]",
    " iteration {0}/ 500000 | consumed samples: 2048 | lm loss: 2.1E+00 | grad norm: 0.25 | nan iterations: 0 |",
)
AT_ONCE = 2000
"""Lines read of a file at once: 256 KiB."""
EVERY = 1000
"""A rule takes one line in so many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=200_000, help="lines of the log that is read (200,000)")
    parser.add_argument("--mtail", metavar="PROGRAM", help="an mtail, to be tried on the same lines")
    telemetry.configure_logging("CRITICAL")
    arguments = parser.parse_args()
    lines = written(arguments.lines)
    rules = shipped()
    ours = rate(lambda: read(lines, FindingTracker(rules)), len(lines))
    quiet = [line for line in lines if not line.startswith(b" iteration")]
    passed_over = rate(lambda: read(quiet, FindingTracker(rules)), len(quiet))
    alone = rate(lambda: match(lines, rules), len(lines))
    patterns = [each.pattern for rule in rules.rules for each in rule.match]
    grep = rate(lambda: grepped(lines, patterns), len(lines))
    few = lines[: max(len(lines) // 20, 1)]
    simple = rate(lambda: one_by_one(few, patterns), len(few))
    print(f"log rules: {ours:.0f} lines a second and core, with all that is done to them; {ours / grep:.2f} of grep -P")
    print(f"the same without Megatron's step lines, which are records: {passed_over:.0f} lines a second and core")
    print(f"rules alone: {alone:.0f} lines a second; {alone / grep:.2f} of grep -P, {alone / simple:.0f} x re by turns")
    print(f"grep -P with all patterns as one: {grep:.0f} lines a second; re by turns: {simple:.0f}")
    if arguments.mtail:
        print(
            f"mtail with a counter for each pattern: {mtail_rate(arguments.mtail, lines, patterns):.0f} lines a second"
        )
    print(f"({len(rules.rules)} rules, {len(patterns)} patterns, {len(lines)} lines, one in {EVERY} taken by a rule)")
    for name, cost in hostile(rules):
        print(f"hostile line of 1 MB, {name}: {cost:.2f} us for each KB")


def shipped() -> RuleSet:
    library = LogRuleLibrary([FOLDER])
    library.reload()
    return library.rule_set


def written(count: int) -> list[bytes]:
    """Return a log with few faults."""
    corpus = yaml.safe_load((FOLDER / "lines_fixture.yaml").read_text(encoding="utf-8"))
    bad = [entry["text"] for entry in corpus if entry["source"] == "training" and "\n" not in entry["text"]]
    return [
        (bad[number // EVERY % len(bad)] if number % EVERY == 0 else QUIET[number % len(QUIET)].format(number)).encode()
        for number in range(count)
    ]


def rate(work: Callable[[], object], lines: int) -> float:
    """Return lines per second of processor time, of the better of two turns, with started programs."""
    best = 0.0
    for _ in range(2):
        began, children = time.process_time(), child_seconds()
        work()
        best = max(best, lines / max(time.process_time() - began + child_seconds() - children, 1e-9))
    return best


def child_seconds() -> float:
    """Return the processor time of ended child programs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read(lines: Sequence[bytes], tracker: FindingTracker) -> int:
    """Process lines like an agent."""
    assembler = LineAssembler(Origin("training", "node-1", "llm-1", stream="a"))
    prefilter = tracker.matcher.prefilter(("training",))
    found = 0
    for start in range(0, len(lines), AT_ONCE):
        placed = list(enumerate(lines[start : start + AT_ONCE], start))
        for line in assembler.feed_many(placed, NOW, prefilter):
            found += len(tracker.feed(line))
    return found


def match(lines: Sequence[bytes], rules: RuleSet) -> int:
    """Match prepared lines."""
    assembler, matcher = LineAssembler(Origin("training")), LineMatcher(rules)
    ready = [line for place, raw in enumerate(lines[:1000]) for line in assembler.feed(raw, NOW, place)]
    turns = len(lines) // max(len(ready), 1)
    return sum(matcher.match(line).rule is not None for _ in range(turns) for line in ready)


def grepped(lines: Sequence[bytes], patterns: Sequence[str]) -> int:
    """Count the lines with any pattern, by grep."""
    joined = "(?J)" + "|".join(f"(?:{pattern.replace('(?m)', '')})" for pattern in patterns if "\\n" not in pattern)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\n".join(lines))
        file.flush()
        argv = ["grep", "-c", "-a", "-P", joined, file.name]
        return int(subprocess.run(argv, capture_output=True, check=False, env={"LC_ALL": "C"}).stdout or 0)


def mtail_rate(program: str, lines: Sequence[bytes], patterns: Sequence[str]) -> float:
    """Return mtail's lines per second of processor time, without its start."""
    return len(lines) / max(mtail_seconds(program, lines, patterns) - mtail_seconds(program, [], patterns), 1e-9)


def mtail_seconds(program: str, lines: Sequence[bytes], patterns: Sequence[str]) -> float:
    """Return the processor time of one run of mtail."""
    with tempfile.TemporaryDirectory() as directory:
        log, rules = Path(directory, "a.log"), Path(directory, "rules.mtail")
        log.write_bytes(b"".join(line + b"\n" for line in lines))
        names = {}
        for number, pattern in enumerate(pattern for pattern in patterns if "\n" not in pattern):
            # Its patterns end at a slash, and its groups would need names that no two patterns share.
            plain = re.sub(r"\(\?P<\w+>", "(?:", pattern.replace("(?m)", "")).replace("/", r"\/")
            names[f"c{number}"] = plain
        declared = "".join(f"counter {name}\n" for name in names)
        rules.write_text(declared + "".join(f"/{pattern}/ {{\n  {name}++\n}}\n" for name, pattern in names.items()))
        argv = [program, "--one_shot", "--logs", str(log), "--progs", str(rules), "--logtostderr"]
        began = child_seconds()
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        assert "compile error" not in done.stderr, done.stderr
        assert not lines or re.search(r"\"Value\": [1-9]", done.stdout), "it has counted nothing"
        return child_seconds() - began


def one_by_one(lines: Sequence[bytes], patterns: Sequence[str]) -> int:
    """Count the lines with any pattern, each tried on each line."""
    compiled = [re.compile(pattern.encode()) for pattern in patterns]
    return sum(any(pattern.search(line) for pattern in compiled) for line in lines)


def hostile(rules: RuleSet) -> list[tuple[str, float]]:
    """Return a slow line's cost in microseconds per KB, by kind."""
    literals = " ".join(literal for rule in rules.rules for literal in rule.contains)
    texts = {
        "all literals of all rules": literals * (1 + (1 << 20) // len(literals)),
        "half a pattern, again and again": "RuntimeError CUDA error Error: " * 40_000,
        "escapes": "\x1b[" * 500_000,
        "carriage returns": "\r 1%|" * 200_000,
        "a dictionary that goes on": "{'loss': " + "[" * 1_000_000,
    }
    tracker, costs = FindingTracker(rules), []
    for name, text in texts.items():
        raw = text.encode()[: 1 << 20]
        read([raw], tracker)
        began = time.process_time()
        for _ in range(10):
            read([raw], tracker)
        costs.append((name, (time.process_time() - began) / 10 * 1e6 / (len(raw) / 1024)))
    return costs


if __name__ == "__main__":
    main()
