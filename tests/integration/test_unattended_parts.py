"""The parts of the unattended benchmark: what is planned, done to the loop, and read from the history."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from benchmarks.unattended import corpus, faults, phases  # noqa: E402 (needs torch)

# PyTorch says so where NumPy is not installed; nothing here needs it.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


def test_twenty_faults_are_four_of_each_kind_in_one_order_per_seed() -> None:
    """Away from both ends, never two at once."""
    plan = faults.plan(20, 10_000, seed=1)
    assert sorted(fault.kind for fault in plan) == sorted(faults.KINDS * 4)
    steps = [fault.step for fault in plan]
    assert steps[0] >= 1_000
    assert steps[-1] <= 9_000
    assert min(later - earlier for earlier, later in itertools.pairwise(steps)) > 300
    assert plan == faults.plan(20, 10_000, seed=1) != faults.plan(20, 10_000, seed=2)


def due(kind: str) -> tuple[faults.Faults, torch.optim.Optimizer, torch.nn.Module]:
    """A fault of that kind that has just happened, at batch 40."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[faults.Fault] = []
    one = faults.Faults([faults.Fault(0, kind, 10)], told.append)
    one.begin(9, 39, optimizer)
    assert told == []
    one.begin(10, 40, optimizer)
    assert [fault.kind for fault in told] == [kind]
    return one, optimizer, model


def test_poison_is_in_the_data_however_often_it_is_met() -> None:
    """The same batches, also after going back; not those before and after."""
    one, optimizer, _ = due(faults.POISON)
    labels = torch.zeros(4, 8, dtype=torch.long)
    one.begin(8, 38, optimizer)
    for batch, is_spoilt in ((39, False), (40, True), (40 + faults.POISONED_BATCHES, False)):
        assert bool(one.spoil(batch, labels, 90).any()) is is_spoilt
    assert torch.equal(one.spoil(41, labels, 90), one.spoil(41, labels, 90))


def test_nan_is_in_the_loss_of_a_few_batches() -> None:
    """As from a sample that overflows."""
    one, _, _ = due(faults.NAN)
    assert math.isnan(float(one.spoil_loss(41, torch.tensor(2.0))))
    assert float(one.spoil_loss(40 + faults.NAN_BATCHES, torch.tensor(2.0))) == 2.0


def test_a_rate_jumps_once_and_stays_where_the_optimizer_has_it() -> None:
    """Until the optimizer's state is put back."""
    one, optimizer, _ = due(faults.RATE)
    one.begin(11, 41, optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * faults.RATE_FACTOR)


def test_gradients_explode_for_some_steps() -> None:
    """To ten thousand, and then no more."""
    one, _, model = due(faults.EXPLOSION)
    for _ in range(faults.EXPLODING_STEPS):
        model(torch.ones(3)).sum().backward()
        one.spoil_gradients(model)
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) > 1000
    model.zero_grad()
    model(torch.ones(3)).sum().backward()
    one.spoil_gradients(model)
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) < 1000


def test_the_text_is_the_projects_own_and_held_out_in_part() -> None:
    """Enough of it, and the same each time."""
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


def fault(number: int, seconds: float) -> dict[str, Any]:
    return {"event": "fault", "time": BEGINNING + seconds, "number": number, "kind": faults.NAN, "step": 10}


def test_each_phase_is_the_time_since_the_one_before() -> None:
    """From the fault on."""
    [account] = phases.accounts([fault(0, 10)], [run(15)])
    assert dict(account.seconds) == pytest.approx(
        {"alert": 5, "accept": 1, "decide": 1, "act": 2, "applied": 3, "verified": 4}
    )
    assert account.is_repaired
    assert not account.told_people


def test_a_run_belongs_to_the_fault_before_it() -> None:
    """And a fault that nobody noticed is not repaired."""
    first, second, third = phases.accounts([fault(0, 10), fault(1, 40), fault(2, 70)], [run(15), run(75, "failed")])
    assert (len(first.repairs), len(second.repairs), len(third.repairs)) == (1, 0, 1)
    assert (first.is_repaired, second.is_repaired, third.is_repaired) == (True, False, False)


def test_what_people_had_to_be_told_is_counted() -> None:
    """Unattended means that nobody was needed."""
    [account] = phases.accounts([fault(0, 10)], [run(15, "failed", notified=True)])
    assert account.told_people


def test_a_slow_machine_is_told_apart_from_the_faults() -> None:
    """It is nobody's fault of the plan, but it is not kept quiet."""
    slow = {**run(15, "failed", notified=True), "playbook": "training-throughput-drop", "action_taken": None}
    [account] = phases.accounts([fault(0, 10)], [run(12), slow])
    assert account.is_repaired
    assert not account.told_people
    assert phases.besides([run(12), slow]) == ["training-throughput-drop: nothing was done, told to people"]
