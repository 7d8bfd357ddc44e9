"""What a schedule says does not depend on what somebody has put into the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from trainmedic.job.reported_values import deviation
from trainmedic.torch.learning_rate import LearningRate

# Schedulers warn where they are stepped without their optimizer.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Scheduler = Callable[[Any], Any]


def warmed_up(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, 35)], [5])


KNOWING_BY_NUMBER: dict[str, Scheduler] = {
    "cosine to a floor": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=3e-4),
    "cosine there and back": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 15),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 10),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [10, 25]),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.97),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 60, 2.0),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=60),
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 60),
    "warmed up": warmed_up,
}
ALL: dict[str, Scheduler] = {
    **KNOWING_BY_NUMBER,
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.97),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 60),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.95)]
    ),
}


def new_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.01)


def off(rate: LearningRate) -> float:
    """How far the rate is off its schedule, which there must be."""
    found = deviation(rate.value, rate.expected)
    assert found is not None
    return found


def looked_at(rate: LearningRate) -> LearningRate:
    """Until it is trusted."""
    for _ in range(3):
        _ = rate.expected
    return rate


@pytest.mark.parametrize("name", ALL)
def test_a_rate_that_nobody_touches_is_on_its_schedule(name: str) -> None:
    """At every step; scaled, and when the scale is taken back, as well."""
    optimizer = new_optimizer()
    scheduler = ALL[name](optimizer)
    rate = looked_at(LearningRate(optimizer, scheduler))
    for step in range(50):
        if step in (20, 35):
            rate.multiply(0.5 if step == 20 else 2.0)
        scheduler.step()
        assert off(rate) < 1e-6, step


@pytest.mark.parametrize("name", KNOWING_BY_NUMBER)
def test_a_rate_that_jumped_stays_off_its_schedule_until_it_is_put_back(name: str) -> None:
    """Also where the scheduler goes on from the rate that it finds, and takes it for its own."""
    optimizer = new_optimizer()
    scheduler = KNOWING_BY_NUMBER[name](optimizer)
    rate = looked_at(LearningRate(optimizer, scheduler))
    for step in range(20):
        if step == 16:
            state = optimizer.state_dict(), dict(scheduler.state_dict())
            optimizer.param_groups[0]["lr"] *= 30
        scheduler.step()
    assert off(rate) > 0.9
    scheduler.load_state_dict(state[1])
    optimizer.load_state_dict(state[0])
    rate.loaded()
    scheduler.step()
    assert off(rate) < 1e-6


def test_a_warmup_by_hand_is_not_off_its_schedule() -> None:
    """Nothing is said until the scheduler has the rate to itself."""
    optimizer = new_optimizer()
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 40)
    rate = LearningRate(optimizer, scheduler)
    for step in range(10):
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1) / 10
        assert rate.expected is None
    for _ in range(10):
        scheduler.step()
        told = rate.expected
    assert told == pytest.approx(rate.value)


def test_of_two_schedulers_that_move_the_same_rate_neither_says_what_it_is() -> None:
    """But each of two optimizers has one of its own."""
    optimizer, other = new_optimizer(), new_optimizer()
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 40)
    both = LearningRate(optimizer, [cosine, lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)])
    assert looked_at(both).expected is None
    apart = LearningRate([other, optimizer], [cosine, lr_scheduler.StepLR(other, 10)])
    assert looked_at(apart).expected == pytest.approx(0.01)
