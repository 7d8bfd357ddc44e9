"""The parts of the unattended benchmark: what is planned, done to the loop, and read from the history."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from benchmarks.unattended import beside, corpus, faults, intruder, launches, phases  # noqa: E402 (needs torch)
from benchmarks.unattended.arms import Plan  # noqa: E402 (needs torch)
from benchmarks.unattended.journal import Execution, Journal  # noqa: E402 (needs torch)
from benchmarks.unattended.trees import HERE, Tree  # noqa: E402 (needs torch)
from tests.support.programs import ROOT  # noqa: E402 (needs torch)

# PyTorch says so where NumPy is not installed; nothing here needs it.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


def test_the_faults_are_as_evenly_divided_among_kinds_as_possible() -> None:
    """The seed sets the order: away from both ends, never two at once, no repair of one of the two before."""
    plan = faults.plan(100, 15_700, seed=1)
    counts = Counter(fault.kind for fault in plan)
    assert counts.keys() == set(faults.KINDS)
    assert len(plan) == sum(counts.values()) == 100
    assert max(counts.values()) - min(counts.values()) == 1
    steps = [fault.step for fault in plan]
    assert (steps[0] >= 400, steps[-1] <= 15_400) == (True, True)
    assert min(later - earlier for earlier, later in itertools.pairwise(steps)) > 100
    repairs = [faults.COMES_AS.get(fault.kind, fault.kind) for fault in plan]
    assert not any(repair in repairs[max(place - 2, 0) : place] for place, repair in enumerate(repairs))
    assert plan == faults.plan(100, 15_700, seed=1) != faults.plan(100, 15_700, seed=2)


Due = Callable[[str], tuple[faults.Faults, torch.optim.Optimizer, torch.nn.Module]]


@pytest.fixture
def due(tmp_path: Path) -> Due:
    """Makes a fault of that kind that has just happened, at batch 40, to a run in which one process is all ranks."""

    def make(kind: str) -> tuple[faults.Faults, torch.optim.Optimizer, torch.nn.Module]:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told: list[faults.Fault] = []
        ground = faults.Ground(None, lambda fault, details: told.append(fault), tmp_path)
        one = faults.Faults([faults.Fault(0, kind, 10)], ground)
        one.begin(9, 39, model, optimizer)
        assert told == []
        one.begin(10, 40, model, optimizer)
        assert [fault.kind for fault in told] == [kind]
        return one, optimizer, model

    return make


def test_a_slow_rank_is_slow_relative_to_its_machine(due: Due, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slower by some milliseconds, or by more than one step if steps are long."""
    waited: list[float] = []
    one, _, _ = due(faults.SLOW)
    monkeypatch.setattr("benchmarks.unattended.faults.time.sleep", waited.append)
    one.slow_down(0.01)
    one.slow_down(1.0)
    assert waited == [faults.SLOW_SECONDS, faults.SLOW_FACTOR]


def test_poison_stays_in_the_data_on_every_pass(due: Due) -> None:
    """It affects the same batches, even after a rollback; those before and after are clean."""
    one, optimizer, model = due(faults.POISON)
    labels = torch.zeros(4, 8, dtype=torch.long)
    one.begin(8, 38, model, optimizer)
    for batch, is_spoilt in ((39, False), (40, True), (40 + faults.POISONED_BATCHES, False)):
        assert bool(one.spoil(batch, labels, 90).any()) is is_spoilt
    assert torch.equal(one.spoil(41, labels, 90), one.spoil(41, labels, 90))


def test_nan_is_in_the_loss_of_a_few_batches(due: Due) -> None:
    """It imitates a sample that overflows."""
    one, _, _ = due(faults.NAN)
    assert math.isnan(float(one.spoil_loss(41, torch.tensor(2.0))))
    assert float(one.spoil_loss(40 + faults.NAN_BATCHES, torch.tensor(2.0))) == 2.0


def test_a_rate_jumps_once_and_stays_in_the_optimizer(due: Due) -> None:
    """It stays until the optimizer's state is restored."""
    one, optimizer, model = due(faults.RATE)
    one.begin(11, 41, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * faults.RATE_FACTOR)


@pytest.mark.parametrize("at", [50, faults.EXPLODING_STEPS + 50])
def test_gradients_explode_for_some_steps_and_until_a_rollback(due: Due, at: int) -> None:
    """They grow to ten thousand, and no further."""
    one, _, model = due(faults.EXPLOSION)

    def explodes() -> bool:
        model.zero_grad()
        model(torch.ones(3)).sum().backward()
        one.spoil_gradients(model)
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) > 1000

    assert all(explodes() for _ in range(at))
    one.go_back()
    assert all(explodes() for _ in range(faults.EXPLODING_STEPS - at))
    assert not explodes()


def test_a_bit_flips_in_one_weight(due: Due) -> None:
    """It becomes sixteen times as large or as small; nothing else changes, and nothing is reported."""
    torch.manual_seed(0)
    before = torch.nn.Linear(3, 3).weight.detach().clone()
    torch.manual_seed(0)
    _, _, model = due(faults.CORRUPTION)
    changed = model.weight.detach().div(before).flatten()
    assert sorted({round(float(ratio), 4) for ratio in changed}) in ([0.0625, 1.0], [1.0, 16.0])


def test_a_fault_happens_once_over_restarts_and_its_data_stay_bad(due: Due, tmp_path: Path) -> None:
    """A new process knows the fault from the record of the first."""
    due(faults.POISON)
    ground = faults.Ground(None, lambda fault, details: pytest.fail("it happens again"), tmp_path)
    model = torch.nn.Linear(3, 3)
    again = faults.Faults([faults.Fault(0, faults.POISON, 10)], ground)
    again.begin(10, 40, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert bool(again.spoil(45, torch.zeros(4, 8, dtype=torch.long), 90).any())


def test_the_text_is_the_projects_own_and_partly_held_out() -> None:
    """There is enough of it, and it is the same each time."""
    text = corpus.load()
    assert len(text.training) > 500_000
    assert 0.05 < len(text.validation) / len(text.training) < 0.15
    assert max(text.training) < text.vocabulary < 128
    assert text == corpus.load()


# --- what the history says ----------------------------------------------------------------------------------


def at(seconds: float) -> str:
    return f"2026-01-31T12:{int(seconds // 60):02}:{seconds % 60:09.6f}Z"


BEGINNING = 1769860800.0  # 2026-01-31T12:00:00Z


def run(began: float, status: str = "succeeded", *, notified: bool = False) -> dict[str, Any]:
    """A run whose alert began then: heard 1 s later, decided 2 s, acted 4 s, applied 7 s, closed 11 s later."""
    rollback = {"action": "job.rollback", "attempts": [{}], "started_at": at(began + 4), "ended_at": at(began + 7)}
    wait = {"action": None, "attempts": [], "started_at": at(began + 2), "ended_at": at(began + 4)}
    notify = {"action": "notify", "attempts": [{}] if notified else [], "started_at": None, "ended_at": None}
    return {
        "playbook": "training-loss-nan",
        "action_taken": "job.rollback",
        "status": status,
        "timestamp": at(began + 2),
        "ended_at": at(began + 11),
        "alerts": [{"starts_at": at(began), "first_heard_at": at(began + 1)}],
        "steps": [wait, rollback, notify],
    }


def fault(number: int, seconds: float, kind: str = faults.NAN, step: int = 10, **more: Any) -> dict[str, Any]:
    return {
        "event": "fault",
        "time": BEGINNING + seconds,
        "number": number,
        "kind": kind,
        "step": step,
        "agree": True,
        **more,
    }


def finished(seconds: float, step: int, agree: bool = True) -> dict[str, Any]:
    return {"event": "finished", "time": BEGINNING + seconds, "step": step, "agree": agree}


def executed(*steps: int) -> list[Execution]:
    """A second each, one after the other."""
    return [Execution(step, BEGINNING + number, BEGINNING + number + 1) for number, step in enumerate(steps)]


STEPS = executed(*range(100))


def test_each_phase_is_the_time_since_the_previous_one() -> None:
    """The first starts at the fault."""
    [account] = phases.accounts([fault(0, 10), finished(100, 99)], STEPS, [run(15)])
    assert dict(account.seconds) == pytest.approx(
        {"alert": 5, "accept": 1, "decide": 1, "act": 2, "applied": 3, "verified": 4}
    )
    assert account.is_repaired
    assert not account.told_people


def test_a_run_belongs_to_the_preceding_fault() -> None:
    """A fault that was not noticed or treated is not repaired, nor one whose run failed,
    nor the last one of a run that did not come to its end."""
    coming = [fault(0, 10), fault(1, 40, step=40), fault(2, 70, step=70), fault(3, 80, step=80)]
    idle = {**run(82), "steps": []}
    found = phases.accounts([*coming, finished(100, 99)], STEPS, [run(15), run(75, "failed"), idle])
    assert [len(account.repairs) for account in found] == [1, 0, 1, 1]
    assert [account.is_repaired for account in found] == [True, False, False, False]
    assert not phases.accounts(coming[:1], STEPS, [run(15)])[0].is_repaired


def test_ranks_that_differ_at_the_next_fault_are_not_a_repair() -> None:
    """This holds however well the run ended."""
    [account] = phases.accounts([fault(0, 10), finished(100, 99, agree=False)], STEPS, [run(15)])
    assert not account.is_repaired


@pytest.mark.parametrize(
    ("loaded", "step", "is_repaired"),
    [
        (None, 0, False),
        ("memory-step-00000008-a", 8, True),
        ("memory-step-00000010-a", 10, False),
        ("step-00000010", 10, True),
        ("step-00000012", 12, True),
    ],
)
def test_faults_that_end_the_processes_are_repaired_by_resuming(
    loaded: str | None, step: int, is_repaired: bool
) -> None:
    """Any checkpoint but the spoiled one counts. One of its step, or a newer one, can have been on its way to
    the disk."""
    resumed = {"event": "resumed", "time": BEGINNING + 20, "step": step, "checkpoint": loaded}
    spoiled = fault(0, 10, faults.BAD_CHECKPOINT, of=10, checkpoint="memory-step-00000010-a")
    events = [spoiled, *([resumed] if loaded is not None else []), finished(100, 99)]
    [account] = phases.accounts(events, STEPS, [])
    assert account.is_repaired is is_repaired


def event(name: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"event": name, "time": BEGINNING + seconds, **more}


def test_a_restart_is_divided_by_its_slowest_node_and_rank() -> None:
    """It runs from the fault to the first step after the checkpoint, over failed attempts in between."""
    ranks = [event("process", 30 + rank, rank=rank, began=BEGINNING + 24 + rank) for rank in range(4)]
    ended = [event(launches.ENDED, seconds, node="node-0") for seconds in (13, 17)]
    began = [event(launches.BEGAN, seconds, node="node-1") for seconds in (15, 20)]
    early = event("process", 16, rank=0, began=BEGINNING + 15.5)
    noticed = [event(launches.NOTICED, 11), event(launches.NOTICED, 13)]
    parts = [event("joined", 35), event("attached", 41), event("resumed", 48, step=8)]
    events = [fault(0, 10, faults.KILL_RANK), *noticed, *ended, *began, early, *ranks, *parts, finished(100, 99)]
    [account] = phases.accounts(sorted(events, key=lambda one: float(one["time"])), STEPS, [])
    durations = dict(zip(phases.RESTART_PHASES, (1, 6, 3, 7, 6, 2, 6, 7, 1), strict=True))
    assert dict(account.seconds) == pytest.approx(durations)
    assert account.seconds_to_good == pytest.approx(39)


def test_launches_are_seen_in_output_and_directories(tmp_path: Path) -> None:
    """Each counts once; a line counts when it is complete."""
    journal, output, logs = Journal(tmp_path / "journal"), tmp_path / "node.log", tmp_path / "logs"
    watch = launches.LaunchWatch(journal, "node-0", output, logs)
    watch.look()
    (logs / "unattended" / "attempt-1").mkdir(parents=True)
    output.write_text("E1128 failed (exitcode: -9) local_rank: 0\ntrainmedic-run: attempt 1 fai")
    watch.look()
    with output.open("a") as file:
        file.write("led: rank 0 was ended by SIGKILL\n")
    (logs / "unattended" / "attempt-2").mkdir()
    watch.look()
    watch.look()
    seen = [(one["event"], one.get("attempt")) for one in journal.events()]
    first = [(launches.BEGAN, 1), (launches.NOTICED, None)]
    assert seen == [*first, (launches.BEGAN, 2), (launches.NOTICED, None), (launches.ENDED, 1)]


def test_two_revisions_are_given_the_same_faults_in_turns() -> None:
    """Each turn has each kind once, its own batches, and numbers that no other turn has."""
    kinds = [faults.KILL_RANK, faults.KILL_NODE]
    plan = Plan(1000, 0.05, 30, 50, 7, faults.plan(6, 1000, 7, kinds))
    turns = beside.turns(plan)
    assert [sorted(one.kind for one in turn.faults) for turn in turns] == [sorted(kinds)] * 3
    assert [one.number for turn in turns for one in turn.faults] == list(range(6))
    assert len({turn.seed for turn in turns}) == 3


def test_a_revision_runs_with_its_own_sdk_and_server() -> None:
    """It comes first on the import path, before this checkout, which has the benchmark."""
    tree = Tree(Path("/other"))
    assert tree.python_path.split(os.pathsep) == ["/other/app", "/other/agent", "/other/logs", "/other/sdk", str(ROOT)]
    assert HERE.keeps_warm


def test_a_checkpoint_deleted_during_the_check_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones are deleted, here between the check of the marker and that of its time."""
    (tmp_path / "step-00000100").mkdir()
    assert intruder.written_at(tmp_path / "step-00000100") == 0.0
    monkeypatch.setattr("benchmarks.unattended.intruder.checkpoints.completion", lambda path: 100)
    assert intruder.written_at(tmp_path / "step-00000100") > 0.0
    assert intruder.written_at(tmp_path / "step-00000050") == 0.0


def test_repeated_work_is_lost() -> None:
    """These are steps from before the fault, those that it spoiled, and time beyond that of steps that count."""
    steps = executed(*range(15), *range(8, 20))
    [account] = phases.accounts([fault(0, 10), finished(27, 19)], steps, [run(12)])
    assert (account.steps_lost, account.good_steps_lost) == (7, 2)
    assert account.seconds_lost == pytest.approx(27 - 10 - 10)
    assert phases.effective(steps) == pytest.approx(20 / 27)


def test_messages_to_people_are_counted() -> None:
    """Unattended means that nobody was needed."""
    [account] = phases.accounts([fault(0, 10), finished(100, 99)], STEPS, [run(15, "failed", notified=True)])
    assert account.told_people


def test_a_slow_machine_is_distinguished_from_the_faults() -> None:
    """It is no planned fault, but it is reported."""
    slow = {**run(15, "failed", notified=True), "playbook": "training-throughput-drop", "action_taken": None}
    [account] = phases.accounts([fault(0, 10), finished(100, 99)], STEPS, [run(12), slow])
    assert account.is_repaired
    assert not account.told_people
    assert phases.besides([run(12), slow]) == ["training-throughput-drop: nothing was done, told to people"]
