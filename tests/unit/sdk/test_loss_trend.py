"""What several reports in a row tell of a loss."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from trainmedic.job.loss_trend import LossTrend
from trainmedic.job.progress import Progress


def values_of(*losses: Any) -> dict[str, float]:
    progress = Progress()
    for step, loss in enumerate(losses):
        progress.add_report(step, loss, None, None, None, now=float(step))
    return LossTrend().values(progress.record)


@pytest.mark.parametrize(
    ("losses", "lowest"),
    [
        ((2.0, 5e3, 6e3, 7e3, 8e3, 9e3), 5e3),
        ((5e3, 6e3, 7e3, 8e3, 2.0), 2.0),
        ((5e3, 6e3, 7e3, 8e3), None),
        ((5e3, 6e3, math.nan, 8e3, 9e3), None),
        ((5e3, 6e3, math.inf, 8e3, 9e3), None),
        ((1.0, None, 2.0, None, 3.0, 4.0, 5.0), 1.0),
    ],
)
def test_the_lowest_of_five_is_high_only_if_all_are(losses: tuple[Any, ...], lowest: float | None) -> None:
    """Not known before there are five, nor where one is no number: that has an alert of its own."""
    assert values_of(*losses).get("training_loss_lowest_of_five") == lowest


def test_a_spike_does_not_move_the_spread_and_noise_does() -> None:
    """Twenty losses are enough; what is not finite does not count."""
    calm = [2.0 + 0.01 * (step % 5) for step in range(60)]
    assert values_of(*calm[:19]).get("training_loss_spread") is None
    assert values_of(*calm)["training_loss_spread"] == pytest.approx(0.01)
    assert values_of(*calm, 1e6, math.nan)["training_loss_spread"] == pytest.approx(0.01, abs=0.005)
    assert values_of(*calm, *[2.0 + (step % 5) for step in range(80)])["training_loss_spread"] > 0.5


def test_a_tensor_is_read_once() -> None:
    """Each costs a wait for its device, though not of the training."""
    reads = []

    class Tensor:
        def detach(self) -> Tensor:
            return self

        def __float__(self) -> float:
            reads.append(1)
            return 2.5

    progress, trend = Progress(), LossTrend()
    for step in range(30):
        progress.add_report(step, Tensor(), None, None, None, now=float(step))
        assert trend.values(progress.record).get("training_loss_lowest_of_five") == (2.5 if step > 3 else None)
    assert len(reads) == 30


def test_it_is_read_while_training_goes_on() -> None:
    """Prometheus asks in a thread of its own."""
    progress, trend, done = Progress(), LossTrend(), threading.Event()

    def train() -> None:
        for step in range(20_000):
            progress.add_report(step, torch.tensor(2.5), None, None, None, now=float(step))
        done.set()

    thread = threading.Thread(daemon=True, target=train)
    thread.start()
    while not done.is_set():
        assert trend.values(progress.record).get("training_loss_lowest_of_five", 2.5) == 2.5
    thread.join()
