"""What `attach` refuses, with the reason, because no checkpoint could bring it back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import trainmedic
import trainmedic.torch
from trainmedic.errors import ConfigurationError


class Outer:
    """A wrapper that is no optimizer itself, and shows only the state of the one that it holds."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.wrapped = inner

    def state_dict(self) -> dict[str, Any]:
        return self.wrapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wrapped.load_state_dict(state)


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


def cases() -> dict[str, tuple[Any, Any, str]]:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    empty = nn.Linear(2, 1, device="meta")
    return {
        "no optimizer": (model, None, "a loop that only evaluates needs connect"),
        "of another model": (model, sgd(other), "none of its 2 parameters is one of the model's"),
        "of one more": (model, sgd(model, other), "2 of its 4 parameters are in no given module"),
        "of one more in a list": (model, [sgd(model), sgd(other)], "optimizer.1: none of its 2 parameters"),
        "without values": (empty, sgd(empty), "2 of its tensors, such as weight, are on the meta device"),
        "wrapped": (
            model,
            Outer(sgd(model)),
            "no param_groups.*the optimizer that it holds, its attribute wrapped",
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_state_that_cannot_be_restored_is_rejected(name: str, medic: trainmedic.Medic, tmp_path: Path) -> None:
    """The error comes at attach, before any training in vain."""
    model, optimizer, reason = cases()[name]
    with pytest.raises(ConfigurationError, match=reason):
        trainmedic.torch.attach(medic, model=model, optimizer=optimizer, checkpoints=tmp_path)


def test_state_that_is_saved_is_accepted(
    medic: trainmedic.Medic, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters of a module in ``also``, and a wrapper that shows groups and state; a frozen model is logged."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = sgd(model, other)
    trainmedic.torch.attach(medic, model=model, optimizer=optimizer, also={"head": other}, checkpoints=tmp_path).close()
    assert "requires a gradient" not in caplog.text
    for parameter in [*model.parameters(), *other.parameters()]:
        parameter.requires_grad_(False)
    trainmedic.torch.attach(medic, model=[model, other], optimizer=optimizer, checkpoints=tmp_path).close()
    assert "no parameter of optimizer requires a gradient: nothing is trained" in caplog.text


class Masters:
    """A part that is no module, and whose state is the weights themselves."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, Any]:
        return {"master": [weight.detach() for weight in self.weights]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for weight, saved in zip(self.weights, state["master"], strict=True):
            weight.data.copy_(saved)


@pytest.mark.parametrize("kind", ["list", "dict", "part", "one left out"])
def test_weights_outside_of_modules_are_named(kind: str, medic: trainmedic.Medic, tmp_path: Path) -> None:
    """For example, an optimizer may update full-precision copies of a half-precision model instead of the model."""
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    weights = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    also: dict[str, Any] = {
        "list": {"master": weights},
        "dict": {"master": {"weight": weights[0], "bias": weights[1]}},
        "part": {"master": Masters(weights)},
        "one left out": {"master": weights[:1]},
    }[kind]
    options: dict[str, Any] = {"optimizer": torch.optim.SGD(weights, lr=0.1), "also": also, "checkpoints": tmp_path}
    if kind == "one left out":
        with pytest.raises(
            ConfigurationError, match=r"1 of its 2 parameters are in no given module.*name the parameters"
        ):
            trainmedic.torch.attach(medic, model=model, **options)
        return
    run = trainmedic.torch.attach(medic, model=model, **options)
    weights[0].data.fill_(3.0)
    run.checkpoint()
    weights[0].data.fill_(5.0)
    run.resume()
    assert weights[0].tolist() == [[3.0, 3.0]]
    run.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_joined", [True, False])
def test_ranks_that_may_end_at_different_steps_are_refused(
    medic: trainmedic.Medic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, is_joined: bool
) -> None:
    """Within ``join()`` a checkpoint would wait half an hour for those that have ended."""
    model = nn.Linear(2, 1)
    model._join_config = SimpleNamespace(enable=is_joined)
    run = trainmedic.torch.attach(medic, model=model, optimizer=sgd(model), checkpoints=tmp_path)
    monkeypatch.setattr(medic, "world_size", ranks)
    with run:
        if is_joined and ranks > 1:
            with pytest.raises(ConfigurationError, match="leave out join"):
                run.step()
        else:
            run.step()
