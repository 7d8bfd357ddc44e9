"""A scaled learning rate stays scaled, whatever scheduler moves it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from trainmedic.errors import Rejected
from trainmedic.torch.learning_rate import LearningRate

# Schedulers warn where they are handed a state, or stepped, in a way that these tests mean.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Decaying:
    """A scheduler of the user's own: neither PyTorch's nor derived from one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9 + 0.001


class Warming(lr_scheduler.LRScheduler):
    """One that derives from PyTorch's and computes in its own way."""

    def get_lr(self) -> list[Any]:
        return [0.2 + 0.01 * self.last_epoch for _ in self.base_lrs]


class Wrapping:
    """As Accelerate wraps one."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        self.scheduler.step()


def in_sequence(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    second = lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=1e-3)
    third = lr_scheduler.ConstantLR(optimizer, 0.5, 30)
    return lr_scheduler.SequentialLR(optimizer, [first, second, third], [5, 20])


def chained(optimizer: Any) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.95)]
    )


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.95),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 5, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [4, 9]),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 40),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, 7, eta_min=0.01
    ),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=40),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4, cycle_momentum=False),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, min_lr=0.02),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=9),
    "SequentialLR": in_sequence,
    "ChainedScheduler": chained,
    "of the user": Decaying,
    "of the user, derived": Warming,
    "wrapped": lambda optimizer: Wrapping(lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))),
}


class Loop:
    """Two groups of parameters with rates of their own, a scheduler, and what scales them."""

    def __init__(self, kind: str, tensors: bool = False) -> None:
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        first, second = (torch.tensor(0.1), torch.tensor(0.03)) if tensors else (0.1, 0.03)
        groups = [{"params": weights[:1], "lr": first}, {"params": weights[1:], "lr": second}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1)
        self.scheduler = SCHEDULERS[kind](self.optimizer)
        self.rate = LearningRate(self.optimizer, self.scheduler)
        self.kind = kind

    def train(self, steps: int) -> list[list[float]]:
        rates = []
        for _ in range(steps):
            self.optimizer.step()
            if self.kind == "ReduceLROnPlateau":
                self.scheduler.step(1.0)
            elif self.scheduler is not None:
                self.scheduler.step()
            rates.append(self.rate.values)
        return rates


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scaled_rate_follows_its_schedule_at_that_scale(kind: str, tensors: bool) -> None:
    """From the step of the change on, each rate is the schedule's times the factor, in every group."""
    plain, scaled = Loop(kind, tensors), Loop(kind, tensors)
    assert scaled.train(7) == plain.train(7)
    scaled.rate.multiply(0.3)
    for mine, theirs in zip(scaled.train(29), plain.train(29), strict=True):
        assert mine == pytest.approx([0.3 * rate for rate in theirs], rel=1e-5 if tensors else 1e-12)


@pytest.mark.parametrize("kind", ["none", "CosineAnnealingLR"])
def test_a_rate_in_a_tensor_of_several_groups_is_scaled_once(kind: str) -> None:
    """PyTorch gives all groups the tensor that is passed as ``lr``."""
    shared, weights = torch.tensor(0.1), [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=shared)
    rate = LearningRate(optimizer, SCHEDULERS[kind](optimizer))
    rate.multiply(0.5)
    assert (rate.values, float(shared)) == (pytest.approx([0.05] * 3), pytest.approx(0.05))
    rate.set_scale(1.0)
    assert rate.values == [float(torch.tensor(0.1))] * 3


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scale_that_is_taken_back_leaves_no_trace(kind: str) -> None:
    """To the bit, where nothing happened in between; and the schedule goes on as if nothing had been."""
    plain, scaled = Loop(kind), Loop(kind)
    plain.train(5)
    scaled.train(5)
    scaled.rate.set_scale(0.3)
    scaled.rate.set_scale(1.0)
    assert scaled.train(20) == plain.train(20)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_checkpoint_from_before_the_change_is_scaled_when_it_is_loaded(kind: str) -> None:
    """The rollback brings the old rate, and the scale that stands is put on it."""
    plain, scaled = Loop(kind), Loop(kind)
    plain.train(5)
    scaled.train(5)
    saved = state_of(scaled)
    scaled.train(3)
    scaled.rate.multiply(0.5)
    scaled.train(3)
    load(scaled, saved)
    scaled.rate.loaded(held=1.0)
    for mine, theirs in zip(scaled.train(9), plain.train(9), strict=True):
        assert mine == pytest.approx([rate / 2 for rate in theirs], rel=1e-12)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_checkpoint_with_a_scale_is_unscaled_where_that_was_undone(kind: str) -> None:
    """The other way round: the state holds half the rate, and the whole one is meant by now."""
    plain, scaled = Loop(kind), Loop(kind)
    plain.train(5)
    scaled.train(5)
    scaled.rate.multiply(0.5)
    saved = state_of(scaled)
    scaled.rate.set_scale(1.0)
    scaled.train(3)
    load(scaled, saved)
    scaled.rate.loaded()  # the state says by itself how it is scaled
    for mine, theirs in zip(scaled.train(9), plain.train(9), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULERS if "of the user" not in kind])
def test_who_knows_nothing_of_it_goes_on_scaled_from_such_a_checkpoint(kind: str) -> None:
    """A restart without Trainmedic keeps the rate that was found to be right."""
    plain, scaled, later = Loop(kind), Loop(kind), Loop(kind)
    plain.train(5)
    scaled.train(5)
    scaled.rate.multiply(0.5)
    load(later, state_of(scaled))
    for mine, theirs in zip(later.train(9), plain.train(9), strict=True):
        assert mine == pytest.approx([rate / 2 for rate in theirs], rel=1e-12)


def state_of(loop: Loop) -> Any:
    """As a checkpoint holds it."""
    scheduler = getattr(loop.scheduler, "scheduler", loop.scheduler)
    held = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
    return pickle.loads(pickle.dumps((loop.optimizer.state_dict(), held)))


def load(loop: Loop, state: Any) -> None:
    optimizer, scheduler = copy.deepcopy(state)
    loop.optimizer.load_state_dict(optimizer)
    if scheduler is not None:
        getattr(loop.scheduler, "scheduler", loop.scheduler).load_state_dict(scheduler)


def test_a_scale_that_stays_changes_no_bit_of_a_state_that_has_it() -> None:
    """So a rollback at a scaled rate replays exactly."""
    loop = Loop("CosineAnnealingLR")
    loop.rate.multiply(0.3)
    loop.train(5)
    saved, rates = state_of(loop), None
    rates = loop.train(5)
    load(loop, saved)
    loop.rate.loaded(held=loop.rate.scale)
    assert loop.train(5) == rates


def test_a_new_object_for_the_same_optimizer_knows_its_scale() -> None:
    """After the loop was set up again in the same process, for schedulers of any kind."""
    for kind in ("LambdaLR", "of the user"):
        loop = Loop(kind)
        loop.rate.multiply(0.5)
        again = LearningRate(loop.optimizer, loop.scheduler)
        before = again.values
        assert again.scale == 0.5
        again.set_scale(0.25)
        assert again.values == [value / 2 for value in before]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e308 * 10])
def test_what_is_no_rate_is_refused_and_changes_nothing(scale: float) -> None:
    """Zero would stop the training for good: nothing can be taken back from it."""
    loop = Loop("LambdaLR")
    before = loop.rate.values
    with pytest.raises(Rejected):
        loop.rate.set_scale(scale)
    assert (loop.rate.values, loop.rate.scale) == (before, 1.0)


def test_a_group_that_the_loop_has_added_since_is_not_unscaled() -> None:
    """As of layers that are trained from then on."""
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first], lr=0.1)
    rate = LearningRate(optimizer)
    rate.set_scale(0.5)
    optimizer.add_param_group({"params": [second], "lr": 0.3})
    rate.set_scale(1.0)
    assert rate.values == [0.1, 0.3]
    rate.set_scale(0.5)
    rate.set_scale(1.0)
    assert rate.values == [0.1, 0.3]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 100),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 1000),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=1000),
    ],
)
def test_a_group_that_is_added_below_a_known_schedule_harms_nothing(make: Callable[[Any], Any]) -> None:
    """The schedule's closed form has no rate for it."""
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first], lr=0.1)
    scheduler = make(optimizer)
    rate, before = LearningRate(optimizer, scheduler), optimizer.param_groups[0]["lr"]
    rate.set_scale(0.5)
    rate.watch(1.0)
    optimizer.add_param_group({"params": [second], "lr": 0.3})
    assert rate.overwritten() is None
    scheduler.step()
    assert rate.overwritten() is None
    rate.loaded()
    rate.set_scale(1.0)
    assert rate.values == pytest.approx([before, 0.3], rel=1e-2)


def test_a_rate_that_is_set_anew_below_a_known_schedule_is_not_unscaled() -> None:
    """The schedule goes on from the loop's rate; the undo leaves it, as it would without a schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 100)
    rate = LearningRate(optimizer, scheduler)
    for _ in range(10):
        scheduler.step()
    raw = rate.value
    rate.set_scale(0.5)
    rate.watch(1.0)
    optimizer.param_groups[0]["lr"] = raw
    scheduler.step()
    assert rate.overwritten() == (rate.value, 0.5 * raw)
    now = rate.value
    rate.set_scale(1.0)
    assert rate.left_alone
    assert rate.value == now
    scheduler.step()
    assert rate.value < now


@pytest.mark.parametrize("jump", [0.1, 10.0])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_rate_that_is_a_multiple_of_the_returned_one_has_the_factor(factor: float, jump: float) -> None:
    """As rates by layer in MAE and timm, also where the loop's schedule jumps right then. A group that has the
    unscaled rate is found."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=1e-3)
    rate = LearningRate(optimizer)

    def set_rates(value: float, second: float) -> None:
        scaled = rate.scaled(value)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = scaled, scaled * second

    set_rates(1e-3, 0.65)
    rate.set_scale(factor)
    rate.watch(1.0)
    set_rates(jump * 1e-3, 0.65)
    assert rate.overwritten() is None
    state = optimizer.state_dict()
    set_rates(jump * 1e-3, 0.65 / factor)
    found = rate.overwritten()
    assert found is not None
    assert found[0] == pytest.approx(jump * 0.65e-3)
    # A rollback: the values before it are those of other rates.
    optimizer.load_state_dict(state)
    rate.loaded()
    rate.watch(1.0)
    set_rates(1e-3, 0.65)
    assert rate.overwritten() is None


def test_the_first_returned_rate_is_no_evidence_against_another_group() -> None:
    """The second group's scaled rate is the first one's unscaled, by chance."""
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(2)], lr=1e-3)
    optimizer.param_groups[1]["lr"] = 2e-3
    rate = LearningRate(optimizer)
    rate.set_scale(0.5)
    rate.watch(1.0)
    scaled = rate.scaled(0.9e-3)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = scaled, scaled * 2
    assert rate.overwritten() is None


def test_a_followed_scheduler_of_the_users_own_is_copied_and_pickled_as_its_class() -> None:
    loop = Loop("of the user")
    loop.rate.set_scale(0.5)
    for copied in (copy.deepcopy(loop.scheduler), pickle.loads(pickle.dumps(loop.scheduler))):
        assert type(copied) is Decaying
        assert copied.optimizer.param_groups[0]["lr"] == loop.rate.value
    assert type(loop.scheduler) is not Decaying


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_large_step_of_a_known_schedule_is_not_the_loops(factor: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    rate = LearningRate(optimizer, scheduler)
    rate.set_scale(factor)
    rate.watch(1.0)
    scheduler.step()
    assert rate.overwritten() is None
    rate.set_scale(1.0)
    assert rate.value == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("factor", "now", "is_lost"),
    [
        (0.5, 0.098, True),
        (0.5, 0.2, True),
        (0.5, 0.06, False),
        (0.5, 0.01, False),
        (2.0, 0.1, False),
        (2.0, 0.9, False),
    ],
)
def test_a_rate_that_a_loop_sets_later_has_lost_its_factor_only_if_it_rises(
    factor: float, now: float, is_lost: bool
) -> None:
    """One that falls may be computed from the scaled rate."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    rate = LearningRate(optimizer)
    rate.set_scale(factor)
    assert rate.set_since() is None
    optimizer.param_groups[0]["lr"] = now
    assert rate.set_since() == (now, 0.1 * factor, is_lost)
    rate.asked_scale()
    assert rate.set_since() is None


def test_what_the_schedule_says_is_known_of_pytorchs_schedulers_only() -> None:
    """It is compared with the rate that is in use; of the user's own scheduler nobody knows."""
    loop = Loop("LambdaLR")
    loop.rate.multiply(0.5)
    assert [loop.rate.expected for _ in range(3)] == [None, None, 0.05]
    loop.train(1)
    assert loop.rate.expected == loop.rate.value
    loop.optimizer.param_groups[0]["lr"] = 7.0
    assert (loop.rate.value, loop.rate.expected) == (7.0, 0.025)
    assert Loop("of the user").rate.expected is None
    assert Loop("none").rate.expected is None
