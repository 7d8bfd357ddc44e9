"""Which of several optimizers of the same parameters is observed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trainmedic.torch.optimizer_steps import OptimizerSteps


class Switching(torch.optim.Optimizer):
    """Steps one of its optimizers at a time, as SWATS: Adam, later SGD."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.adam, self.sgd = torch.optim.Adam(self.param_groups), torch.optim.SGD(self.param_groups)
        self.adam.param_groups = self.sgd.param_groups = self.param_groups
        self.used: torch.optim.Optimizer = self.adam

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.used.step()


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


def test_whichever_inner_optimizer_steps_is_counted() -> None:
    optimizer = Switching([parameter()])
    steps = OptimizerSteps([optimizer])
    optimizer.step()
    optimizer.used = optimizer.sgd
    optimizer.step()
    assert steps.count == 2
    steps.close()
    optimizer.step()
    assert steps.count == 2


def test_optimizers_that_refer_to_each_other_are_counted() -> None:
    first: Any = torch.optim.SGD([parameter()], lr=0.1)
    second: Any = torch.optim.SGD(first.param_groups, lr=0.1)
    second.param_groups = first.param_groups
    first.slow, second.fast = second, first
    steps = OptimizerSteps([first, second])
    first.step()
    second.step()
    assert steps.count == 2


def test_wrappers_around_each_other_are_counted() -> None:
    first, second = (torch.optim.SGD([parameter()], lr=0.1) for _ in range(2))
    first.optimizer, second.optimizer = second, first  # type: ignore[attr-defined]
    steps = OptimizerSteps([first])
    first.step()
    assert steps.count == 1


def test_optimizers_that_share_the_groups_of_another_are_hooked() -> None:
    # As in a container of optimizers that is no optimizer of PyTorch's.
    members = [torch.optim.SGD([parameter()], lr=0.1) for _ in range(2)]
    groups = [group for member in members for group in member.param_groups]
    steps = OptimizerSteps([SimpleNamespace(optimizers=members, param_groups=groups)])
    members[1].step()
    assert (steps.is_hooked, steps.count) == (True, 1)
    further = {"params": [parameter()]}  # which neither of them steps
    assert not OptimizerSteps([SimpleNamespace(optimizers=members, param_groups=[*groups, further])]).is_hooked


def test_only_a_stranger_of_the_same_parameters_is_another_optimizer() -> None:
    # Not the optimizer of another part, such as a discriminator, nor what uses the same rates.
    shared = parameter()
    optimizer: Any = torch.optim.SGD([shared], lr=0.1)
    steps = OptimizerSteps([optimizer])
    steps.watch_others()
    wrapper = torch.optim.SGD([shared], lr=0.1)
    wrapper.param_groups = list(optimizer.param_groups)
    optimizer.later = torch.optim.SGD([shared], lr=0.1)
    for each in (wrapper, optimizer.later, torch.optim.SGD([parameter()], lr=0.1)):
        each.step()
    assert steps.other_count == 0
    stranger = torch.optim.SGD([shared], lr=0.1)
    stranger.step()
    assert steps.other_count == 1
    steps.close()
    stranger.step()
    assert steps.other_count == 1
