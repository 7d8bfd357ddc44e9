"""The three arms, each with its processes: without faults, with faults alone, and with Trainmedic."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.unattended import corpus, faults, intruder, stack
from benchmarks.unattended.journal import Execution, Journal
from benchmarks.unattended.launches import LaunchWatch
from benchmarks.unattended.trees import HERE, Tree
from tests.support.programs import PYTHON_PATH, Program, eventually, free_port

CALM, ALONE, MEDIC = "calm", "alone", "medic"
NODES = 2
_SETTLES = 60.0
"""Seconds after the end in which pending alerts may resolve."""
_LAUNCHED = {"--retries": 3, "--delay": 60, "--grace": 30, "--hang-after": 120}
"""Options of trainmedic-run, in seconds before division; the last is shorter than by default."""


@dataclass(frozen=True)
class Plan:
    """Duration, speed and faults."""

    steps: int
    pace: float
    faster: int
    checkpoint_every: int
    seed: int
    faults: Sequence[faults.Fault]


@dataclass(frozen=True)
class Arm:
    name: str
    events: Sequence[Mapping[str, Any]]
    executions: Sequence[Execution]

    def only(self, event: str) -> Mapping[str, Any] | None:
        return next((one for one in self.events if one["event"] == event), None)


@dataclass(frozen=True)
class Arms:
    """All arms, and every run of a playbook for the last."""

    by_name: Mapping[str, Arm]
    runs: Sequence[Mapping[str, Any]]
    failure: str
    """Reason why the last did not end well, or ""."""


def run(directory: Path, plan: Plan) -> Arms:
    """Run all three arms. The first two wait for nothing and run next to the third."""
    corpus.keep(directory / "text")
    arms: dict[str, Arm] = {}
    failed: list[BaseException] = []

    def unprotected() -> None:
        try:
            arms[CALM] = _unprotected(directory, CALM, plan)
            arms[ALONE] = _unprotected(directory, ALONE, plan)
        except BaseException as error:
            failed.append(error)

    beside = threading.Thread(target=unprotected)
    with ExitStack() as ends:
        ends.callback(beside.join)
        beside.start()
        arms[MEDIC], runs, failure = protected(directory, plan)
    if failed:
        raise failed[0]
    return Arms(arms, runs, failure)


def _trainer(directory: Path, plan: Plan) -> list[str]:
    argv = ["-m", "benchmarks.unattended.trainer", "--directory", str(directory)]
    argv += ["--text", str(directory.parent / "text")]
    return [*argv, "--steps", str(plan.steps), "--seed", str(plan.seed)]


def _unprotected(directory: Path, name: str, plan: Plan) -> Arm:
    """Train in one process, with the batches of all ranks; with faults until it dies or hangs."""
    argv = [sys.executable, *_trainer(directory / name, plan)]
    if name == ALONE:
        argv += ["--faults", json.dumps(plan.faults)]
    journal = Journal(directory / name)
    with Program(argv, directory / f"{name}.log", {"PYTHONPATH": PYTHON_PATH}) as program:

        def is_over() -> bool:
            hangs = any(one.get("kind") == faults.COLLECTIVE for one in journal.events())
            return hangs or program.process.poll() is not None

        eventually(is_over, _patience(plan), f"the end of the arm {name}", every=0.5)
        if name == CALM and program.process.poll():
            raise AssertionError(f"the arm {name} ended with {program.process.returncode}:\n{program.tail()}")
    return Arm(name, journal.events(), journal.executions())


def protected(directory: Path, plan: Plan, tree: Tree = HERE) -> tuple[Arm, list[dict[str, Any]], str]:
    """Return the arm that the Trainmedic of `tree` protects, its playbook runs, and why it did not end well. The text
    is in `directory` already.
    """
    port, failure = free_port(), ""
    journal = Journal(directory / MEDIC)
    with ExitStack() as ends:
        disk = directory / "disk"
        if any(fault.kind == faults.FULL_DISK for fault in plan.faults):
            ends.enter_context(intruder.small_disk(disk))
        looked_after = ends.enter_context(stack.running(directory / "stack", port, plan.faster, tree))
        outside = intruder.Intruder(journal, looked_after, disk)
        outside.start()
        ends.callback(outside.end)
        try:
            _launch(directory, plan, port, looked_after.state, tree)
        except (AssertionError, KeyboardInterrupt) as error:  # what came until then is worth a report
            failure = str(error) or "interrupted"
        outside.end()
        if outside.failed is not None:
            failure = failure or f"faults from outside were not done any more: {outside.failed!r}"
        with suppress(AssertionError):  # the report says of each run how it ended
            eventually(lambda: looked_after.open_runs() == 0, _SETTLES, "the end of every repair", every=1.0)
        runs = looked_after.runs()
    (directory / "runs.json").write_text(json.dumps(runs, indent=1))
    return Arm(MEDIC, journal.events(), journal.executions()), runs, failure


def _launch(directory: Path, plan: Plan, port: int, state: Path, tree: Tree) -> None:
    """Start the job on each node, and wait for its end."""
    endpoint = f"127.0.0.1:{free_port()}"
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=unattended"]
    rendezvous += ["--rdzv-conf=last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=3"]
    argv = [*_trainer(directory / MEDIC, plan), "--faults", json.dumps(plan.faults), "--medic"]
    argv += ["--pace", str(plan.pace), "--faster", str(plan.faster), "--metrics-port", str(port)]
    argv += ["--checkpoints", str(directory / "disk" / "checkpoints"), "--checkpoint-every", str(plan.checkpoint_every)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    torchrun += [f"--nproc-per-node={faults.RANKS // NODES}", *argv]
    options = [f"{name}={seconds / plan.faster:.2f}s" for name, seconds in _LAUNCHED.items() if name != "--retries"]
    options += [f"--retries={_LAUNCHED['--retries']}", "--min-nodes=1", f"--max-nodes={NODES}"]
    options += ["--warm"] if tree.keeps_warm else []
    with ExitStack() as ends:
        shared = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="unattended-", dir="/dev/shm")))
        memory = [shared / f"node-{node}" for node in range(NODES)]
        torchrun += ["--memory", *map(str, memory)]
        programs = []
        for node, own_memory in enumerate(memory):
            own_memory.mkdir()
            logs = ["--job=unattended", f"--log-dir={directory / f'node-{node}'}"]
            environment = {
                "PYTHONPATH": tree.python_path,
                "TRAINMEDIC_STATE_DIR": str(state),
                "TRAINMEDIC_NODE": f"node-{node}",
                "TRAINMEDIC_SHARED_MEMORY": str(own_memory),
            }
            line = [sys.executable, "-m", "trainmedic.launch", *logs, *options, "--", *torchrun]
            output = directory / f"node-{node}.log"
            programs.append(ends.enter_context(Program(line, output, environment)))
            watch = LaunchWatch(Journal(directory / MEDIC), f"node-{node}", output, directory / f"node-{node}")
            watch.start()
            ends.callback(watch.end)
        _wait(programs, _patience(plan))


def _wait(programs: Sequence[Program], patience: float) -> None:
    until = time.monotonic() + patience
    while any(program.process.poll() is None for program in programs):
        failed = [program for program in programs if program.process.poll()]
        if failed or time.monotonic() > until:
            tails = "\n\n".join(program.tail() for program in programs)
            raise AssertionError(f"the job did not come to its end:\n{tails}")
        time.sleep(0.2)


def _patience(plan: Plan) -> float:
    return plan.steps * max(plan.pace, 0.05) * 2 + 60 * len(plan.faults) + 120
