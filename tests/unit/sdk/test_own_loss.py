"""The loss of a rank as other threads see it: at once where it is a number, and without a wait where it is a tensor."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainmedic.job.own_loss import COPY_INTERVAL, OwnLoss
from trainmedic.job.progress import Progress
from trainmedic.job.rank_stats import RankStats


class Event:
    """Passes when the test says so."""

    has_passed = False

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def record(self, stream: Any) -> None:
        self.recorded.append(stream)

    def query(self) -> bool:
        return Event.has_passed


class Tensor:
    """A tensor of an accelerator. Asking for its number is a wait for the device, which no test may make."""

    is_cpu = False
    device = SimpleNamespace(type="accelerator")

    def __init__(self, value: float) -> None:
        self.value = value

    def detach(self) -> Tensor:
        return self

    def to(self, device: str, non_blocking: bool) -> float:
        assert (device, non_blocking) == ("cpu", True)
        return self.value

    def __float__(self) -> float:
        raise AssertionError("the training thread would wait for the device")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """PyTorch's library for it."""
    library = SimpleNamespace(
        Event=Event, current_stream=lambda device: "stream", is_current_stream_capturing=lambda: False
    )
    monkeypatch.setattr(sys.modules["torch"], "accelerator_of_a_test", library, raising=False)
    monkeypatch.setattr(Tensor, "device", SimpleNamespace(type="accelerator_of_a_test"))
    monkeypatch.setattr(Event, "has_passed", False)
    return library


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (2.5, 2.5),
        (float("inf"), math.inf),
        (3, 3.0),
        (torch.tensor(1.25), 1.25),
        (torch.tensor(2.0, requires_grad=True) * 2, 4.0),
        (torch.tensor(-math.inf), -math.inf),
    ],
)
def test_a_number_in_main_memory_is_known_at_once(loss: Any, value: float) -> None:
    """As it was reported: also an infinite one."""
    own = OwnLoss()
    own.note(7, loss, 0.0)
    assert own.latest == (7, value)


def test_a_loss_that_is_no_number_is_nan() -> None:
    """It is no infinite one."""
    own = OwnLoss()
    own.note(7, torch.tensor(math.nan), 0.0)
    assert own.latest is not None
    assert math.isnan(own.latest[1])


@pytest.mark.parametrize("loss", [torch.tensor([1.0, 2.0]), "low", None, object()])
def test_what_is_no_loss_leaves_it_unknown(loss: Any) -> None:
    """A report never fails because of it."""
    own = OwnLoss()
    own.note(7, loss, 0.0)
    assert own.latest is None


def test_a_tensor_of_a_device_is_taken_when_the_device_has_passed_it(accelerator: SimpleNamespace) -> None:
    """Nothing waits, and no second copy is begun meanwhile."""
    own = OwnLoss()
    own.note(1, Tensor(4.0), 0.0)
    own.note(2, Tensor(3.0), 10.0)
    assert own.latest is None
    Event.has_passed = True
    own.note(3, Tensor(2.0), 20.0)
    assert own.latest == (1, 4.0)
    own.note(4, Tensor(1.0), 20.0 + COPY_INTERVAL / 2)
    assert own.latest == (1, 4.0)
    own.note(5, Tensor(0.5), 20.0 + COPY_INTERVAL)
    assert own.latest == (3, 2.0)


def test_no_copy_is_made_while_a_graph_is_captured(accelerator: SimpleNamespace) -> None:
    """It would become a part of the graph."""
    accelerator.is_current_stream_capturing = lambda: True
    own = OwnLoss()
    Event.has_passed = True
    for second in range(3):
        own.note(second, Tensor(1.0), 2.0 * second)
    assert own.latest is None


def test_a_rollback_and_another_training_forget_it() -> None:
    """It is of another course."""
    progress = Progress()
    stats = RankStats(progress, "node-7")
    progress.add_report(5, 2.25, None, None, None, 1.0)
    assert stats.own_loss() == {"node": "node-7", "loss": 2.25, "loss_step": 5}
    assert stats.measure(1.0)["loss"] == 2.25
    progress.go_back(3, 2.0)
    assert stats.own_loss() == {"node": "node-7"}
    progress.add_late_values(2.75, None)
    assert stats.own_loss()["loss"] == 2.75
    progress.begin_training(2.0)
    assert stats.own_loss() == {"node": "node-7"}
