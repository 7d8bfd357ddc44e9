"""The three arms, one after the other where nothing waits, and what came of them.

python -m benchmarks.unattended              about a quarter of an hour
python -m benchmarks.unattended --short      three faults in three quarters of a minute
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.unattended import faults, phases, stack
from tests.support.programs import PYTHON_PATH, Program, eventually, free_port

CALM, ALONE, MEDIC = "calm", "alone", "medic"
_SETTLES = 60.0
"""Seconds after the end for what is still waiting to see its alert resolve."""


@dataclass(frozen=True)
class Plan:
    """How long, how fast, and which faults."""

    steps: int
    pace: float
    faster: int
    checkpoint_every: int
    seed: int
    faults: Sequence[faults.Fault]


def _named(coming: Sequence[faults.Fault], kinds: Sequence[str]) -> list[faults.Fault]:
    """The same faults, but of these kinds, in turn."""
    return [fault._replace(kind=kinds[fault.number % len(kinds)]) for fault in coming]


SHORT = Plan(
    steps=600,
    pace=0.05,
    faster=30,
    checkpoint_every=50,
    seed=0,
    faults=_named(faults.plan(3, 600, seed=0), [faults.NAN, faults.RATE, faults.HANG]),
)


@dataclass(frozen=True)
class Arm:
    """One run of the trainer."""

    name: str
    events: Sequence[Mapping[str, Any]]

    def only(self, event: str) -> Mapping[str, Any] | None:
        return next((one for one in self.events if one["event"] == event), None)

    @property
    def end(self) -> Mapping[str, Any]:
        """The last that was heard with a validation loss: the end, or the hang that has none."""
        return next(one for one in reversed(self.events) if "validation" in one)


@dataclass(frozen=True)
class Outcome:
    """All arms, what Trainmedic did about each fault, and what else it noticed."""

    plan: Plan
    arms: Mapping[str, Arm]
    told: Sequence[phases.Account]
    besides: Sequence[str]


def events(program: Program) -> list[dict[str, Any]]:
    return [json.loads(line) for line in program.log.read_text().splitlines() if line.startswith("{")]


def train(directory: Path, arm: str, plan: Plan, port: int = 0, state: Path | None = None) -> Arm:
    """One arm, until it has ended or, alone, hangs."""
    directory.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "benchmarks.unattended.trainer"]
    argv += ["--steps", str(plan.steps), "--seed", str(plan.seed)]
    if arm != CALM:
        argv += ["--faults", json.dumps(plan.faults)]
    if arm == MEDIC:
        argv += ["--medic", "--pace", str(plan.pace), "--metrics-port", str(port)]
        argv += ["--checkpoints", str(directory / "checkpoints"), "--checkpoint-every", str(plan.checkpoint_every)]
        argv += ["--hang-floor", str(60 / plan.faster)]
    environment = {"PYTHONPATH": PYTHON_PATH}
    if state is not None:
        environment["TRAINMEDIC_STATE_DIR"] = str(state)
    with Program(argv, directory / f"{arm}.log", environment) as program:
        patience = plan.steps * max(plan.pace, 0.05) * 2 + 120

        def is_over() -> bool:
            hangs = arm == ALONE and any(one.get("kind") == faults.HANG for one in events(program))
            return hangs or program.process.poll() is not None

        eventually(is_over, patience, f"the end of the arm {arm}", every=0.5)
        if program.process.poll():
            raise AssertionError(f"the arm {arm} ended with {program.process.returncode}:\n{program.tail()}")
    return Arm(arm, events(program))


def protected(directory: Path, plan: Plan) -> tuple[Arm, list[dict[str, Any]]]:
    """The arm that Trainmedic looks after, and every run of a playbook for it."""
    port = free_port()
    with stack.running(directory / "stack", port, plan.faster) as looked_after:
        arm = train(directory, MEDIC, plan, port, looked_after.state)
        eventually(lambda: looked_after.open_runs() == 0, _SETTLES, "the end of every repair", every=1.0)
        runs = looked_after.runs()
    (directory / "runs.json").write_text(json.dumps(runs, indent=1))
    return arm, runs


def compare(directory: Path, plan: Plan) -> Outcome:
    """All three arms. The first two wait for nothing and run beside the third."""
    arms: dict[str, Arm] = {}
    failed: list[BaseException] = []

    def unprotected() -> None:
        try:
            for name in (CALM, ALONE):
                arms[name] = train(directory, name, plan)
        except BaseException as error:
            failed.append(error)

    beside = threading.Thread(target=unprotected)
    with ExitStack() as ends:
        ends.callback(beside.join)
        beside.start()
        arms[MEDIC], runs = protected(directory, plan)
    if failed:
        raise failed[0]
    if len({arm.events[0]["digest"] for arm in arms.values()}) > 1:
        raise AssertionError("the checkout was changed while the arms ran, and with it the text that they learn")
    return Outcome(plan, arms, phases.accounts(arms[MEDIC].events, runs), phases.besides(runs))


def ratio(arm: Arm, plan: Plan) -> float:
    """The part of the time that went into steps that count.

    Alone, only the steps before the first fault that nothing gets over do: before the first NaN or hang.
    Otherwise those that were not gone back over do. What is lost are the others, hangs, checkpoints and repairs.
    """
    if arm.name == ALONE:
        stops = [int(one["step"]) for one in arm.events if one.get("kind") in (faults.HANG, faults.NAN)]
        return min([*stops, plan.steps]) / plan.steps
    return float(arm.end["useful"] / arm.end["seconds"])


def report(outcome: Outcome) -> str:
    """What is printed."""
    plan, arms, told = outcome.plan, outcome.arms, outcome.told
    calm = arms[CALM].end["validation"]
    digest = arms[CALM].events[0]["digest"]
    lines = [
        f"{plan.steps} steps, {len(plan.faults)} faults, a checkpoint every {plan.checkpoint_every} steps, "
        f"text {digest}; durations of rules and playbooks divided by {plan.faster}",
        "",
        "arm     validation loss            steps wasted   effective training time",
    ]
    for name in (CALM, ALONE, MEDIC):
        arm = arms[name]
        end = arm.end
        loss = end["validation"]
        change = f"({(loss / calm - 1) * 100:+.2f} %)" if name != CALM and loss == loss else ""
        wasted = end["executed"] - plan.steps if name == MEDIC else "-"
        effective = f"{ratio(arm, plan):.3f}" if name != CALM else "-"
        lines.append(f"{name:7} {loss:<6.4f} {change:19} {wasted!s:>11}   {effective:>22}")
    nan = arms[ALONE].only("nan")
    stood = arms[ALONE].end
    lines += [
        "",
        f"alone: no number since step {nan['step']}" if nan else "alone: always a number",
        f"alone: stands still since step {stood['step']}" if stood["event"] == "fault" else "alone: came to its end",
        "",
        "fault                        step  " + "".join(f"{phase:>9}" for phase in phases.PHASES) + "  repaired by",
    ]
    for one in told:
        times = "".join(f"{one.seconds[p]:9.2f}" if p in one.seconds else "        -" for p in phases.PHASES)
        how = "; ".join(one.repairs) or "nothing"
        note = "" if one.is_repaired else "  NOT REPAIRED"
        lines.append(f"{one.number:3} {one.kind:22} {one.step:6}  {times}  {how}{note}")
    medians = [statistics.median([one.seconds[p] for one in told if p in one.seconds] or [0]) for p in phases.PHASES]
    lines.append(f"median, seconds{'':20}" + "".join(f"{median:9.2f}" for median in medians))
    by_people = sum(one.told_people for one in told)
    lines += ["", f"{sum(one.is_repaired for one in told)} of {len(plan.faults)} repaired, {by_people} told to people"]
    lines += [f"besides: {count} x {what}" for what, count in Counter(outcome.besides).items()]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="three faults in three quarters of a minute")
    parser.add_argument("--steps", type=int, default=18_000)
    parser.add_argument("--faults", type=int, default=20, metavar="COUNT")
    parser.add_argument("--kinds", nargs="+", default=None, metavar="KIND", help="only these, in turn")
    parser.add_argument("--pace", type=float, default=0.05, metavar="SECONDS", help="least time of a step")
    parser.add_argument("--faster", type=int, default=30, help="what durations of rules and playbooks are divided by")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where logs are left (default: a temporary one)")
    return parser.parse_args()


def planned(options: argparse.Namespace) -> Plan:
    if options.short:
        return SHORT
    coming = faults.plan(options.faults, options.steps, options.seed)
    if options.kinds:
        coming = _named(coming, options.kinds)
    return Plan(options.steps, options.pace, options.faster, options.checkpoint_every, options.seed, coming)


def main() -> None:
    options = parse()
    plan = planned(options)
    with tempfile.TemporaryDirectory(prefix="unattended-") as temporary:
        directory = options.directory or Path(temporary)
        began = time.monotonic()
        print(report(compare(directory, plan)))
        print(f"took {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
