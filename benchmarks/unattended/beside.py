"""Seconds of this checkout and of another revision: the same faults, in turns, in one run.

Each turn is a training run with one fault of each kind, protected by one of the two. They take turns so that other load
affects both. Benchmark and trainer are this checkout's; server, SDK, playbooks and rules are the revision's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.unattended import arms, corpus, durations, faults, phases
from benchmarks.unattended.arms import Plan
from benchmarks.unattended.phases import Account
from benchmarks.unattended.trees import HERE, Tree, checked_out

_STEPS = (400, 300, 300)
"""Before the first fault, for each fault, and after the last one."""


def compare(directory: Path, plan: Plan, revision: str) -> str:
    """Measure `revision` and this checkout, and return the report."""
    told: dict[str, list[Account]] = {revision: [], "this": []}
    with checked_out(revision, directory / "other") as other:
        for number, turn in enumerate(turns(plan)):
            order = [(revision, other), ("this", HERE)]
            for name, tree in order if number % 2 == 0 else reversed(order):
                told[name] += _measured(directory / f"turn-{number}-{name}", turn, tree)
    return report(revision, told[revision], told["this"])


def turns(plan: Plan) -> list[Plan]:
    """Return the plan's faults in turns, each with one of each kind, and with different batches."""
    kinds = sorted({fault.kind for fault in plan.faults}, key=faults.KINDS.index)
    before, each, after = _STEPS
    steps = before + each * len(kinds) + after
    found = []
    for first in range(0, len(plan.faults), len(kinds)):
        seed = plan.seed * 1000 + first
        # Numbers go on from turn to turn: by its number a corrupt checkpoint is one in memory or one on the disk.
        coming = [one._replace(number=first + one.number) for one in faults.plan(len(kinds), steps, seed, kinds)]
        found.append(replace(plan, steps=steps, seed=seed, faults=coming))
    return found


def _measured(directory: Path, plan: Plan, tree: Tree) -> list[Account]:
    """Return the accounts of one turn. Raises AssertionError if the SDK is not the tree's."""
    directory.mkdir(parents=True)
    corpus.keep(directory / "text")
    arm, runs, failure = arms.protected(directory, plan, tree)
    used = {event["sdk"] for event in arm.events if event["event"] == "joined"}
    if used != {str(tree.sdk)}:
        raise AssertionError(f"the ranks used the SDK in {sorted(used)}, not {tree.sdk}")
    if failure:
        print(f"{directory.name}: DID NOT COME TO ITS END: {failure}", flush=True)
    return phases.accounts(arm.events, arm.executions, runs)


def report(revision: str, other: Sequence[Account], this: Sequence[Account]) -> str:
    lines = [f"seconds from a fault to the next good step, median: {revision}, this checkout, ratio"]
    kinds = sorted({one.kind for one in (*other, *this)}, key=faults.KINDS.index)
    lines += [f"{kind:22}{_row(_of(kind, other), _of(kind, this))}" for kind in kinds]
    lines.append(f"{'all':22}{_row(other, this)}")
    for name, told in ((revision, other), ("this checkout", this)):
        repaired = sum(one.is_repaired for one in told)
        lines += ["", f"{name}: {repaired} of {len(told)} repaired; median seconds of each phase"]
        lines += durations.tables(told)
    return "\n".join(lines)


def _of(kind: str, told: Sequence[Account]) -> list[Account]:
    return [one for one in told if one.kind == kind]


def _row(other: Sequence[Account], this: Sequence[Account]) -> str:
    before, now = _seconds(other), _seconds(this)
    if not before or not now:
        return "nothing to compare"
    old, new = statistics.median(before), statistics.median(now)
    return f"{old:9.2f}{new:9.2f}{new / old:9.2f}   ({len(before)} and {len(now)} faults)"


def _seconds(told: Sequence[Account]) -> list[float]:
    return [one.seconds_to_good for one in told if one.seconds_to_good is not None]
