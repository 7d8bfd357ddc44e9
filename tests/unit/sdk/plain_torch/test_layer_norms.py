"""The gradient norms by layer: which are shown, and where a gradient that is no number begins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainmedic
import trainmedic.torch
from trainmedic.errors import ConfigurationError
from trainmedic.job.metrics import JobCollector, largest_norms
from trainmedic.torch.meters import layer_norms
from trainmedic.torch.meters.layer_norms import LayerNorms, layer_of


class Breaking(torch.autograd.Function):
    """A gradient that is not a number, from here towards the input."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * math.nan


class Model(nn.Module):
    def __init__(self, breaks_before: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.head = nn.Linear(4, 1)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.breaks_before = breaks_before

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.embedding(inputs)
        for number, layer in enumerate(self.layers):
            inputs = Breaking.apply(layer(inputs)) if number == self.breaks_before else layer(inputs)  # type: ignore[no-untyped-call]
        return self.head(inputs)  # type: ignore[no-any-return]


@pytest.fixture
def medic() -> Iterator[trainmedic.Medic]:
    with trainmedic.connect("llm-1", redis_url="redis://127.0.0.1:1/0", rank=0, world_size=1, layer_norms=3) as medic:
        yield medic


def shown(medic: trainmedic.Medic) -> dict[str, float]:
    collector = JobCollector("llm-1", medic.progress, dict, lambda: 0.0)
    families = {family.name: family.samples for family in collector.collect()}
    return {sample.labels["layer"]: sample.value for sample in families.get("training_layer_gradient_norm", ())}


def step(model: nn.Module, medic: trainmedic.Medic) -> LayerNorms:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    norms = LayerNorms([model], [optimizer], medic)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return norms


def test_the_largest_layers_are_shown_and_no_more(medic: trainmedic.Medic) -> None:
    """As many as were asked for, however many layers there are. A norm is that of all parameters of the layer."""
    model = Model()
    step(model, medic)
    by_layer = {
        name: math.hypot(*(each.grad.norm().item() for each in module.parameters()))  # type: ignore[union-attr]
        for name, module in {
            "embedding": model.embedding,
            "head": model.head,
            **{f"layers.{number}": layer for number, layer in enumerate(model.layers)},
        }.items()
    }
    assert shown(medic) == pytest.approx(dict(sorted(by_layer.items(), key=lambda item: -item[1])[:3]))


def test_a_gradient_that_is_no_number_is_found_where_it_begins(medic: trainmedic.Medic) -> None:
    """From there to the input all are no numbers; the first one is where to look."""
    step(Model(breaks_before=4), medic)
    assert list(shown(medic)) == ["layers.4", "layers.3", "layers.2"]
    assert all(map(math.isnan, shown(medic).values()))


def test_they_are_measured_before_accelerate_clips(medic: trainmedic.Medic, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = Model()
    loader = DataLoader(TensorDataset(torch.ones(2, 4)), 2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    run = trainmedic.torch.attach(
        medic, accelerator=accelerator, model=model, optimizer=optimizer, loader=loader, checkpoints=tmp_path
    )
    for (rows,) in run.batches(steps=1):
        with run.step() as step:
            step.backward(model(rows).sum())
            norm = step.update(max_norm=1e-3)
    run.close()
    assert norm is not None
    assert 1e-3 < max(shown(medic).values()) <= norm


def test_they_are_measured_every_few_seconds(medic: trainmedic.Medic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each step, which would cost as much as clipping does."""
    now = [100.0]
    monkeypatch.setattr(layer_norms.time, "monotonic", lambda: now[0])
    norms = step(Model(), medic)
    first = medic.progress.layer_norms
    norms.measure()
    assert medic.progress.layer_norms is first
    now[0] += 5.0
    norms.measure()
    assert medic.progress.layer_norms is not first
    norms.close()


def test_nothing_is_measured_unasked() -> None:
    """Nor on a rank that shows nothing."""
    for rank, layers in ((0, 0), (1, 3)):
        with trainmedic.connect(
            "llm-1", redis_url="redis://127.0.0.1:1/0", rank=rank, world_size=2, layer_norms=layers
        ) as medic:
            step(Model(), medic)
            assert medic.progress.layer_norms == {}


def test_what_cannot_be_measured_does_not_end_the_step(
    medic: trainmedic.Medic, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once."""
    norms = step(Model(), medic)
    norms._layers = {"strange": [object()]}  # type: ignore[list-item]
    for _ in range(3):
        norms._due_at = min(norms._due_at, math.inf if "cannot measure the layers'" in caplog.text else 0.0)
        norms.measure()
    assert caplog.text.count("cannot measure the layers'") == 1


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.7.mlp.up_proj.weight", "model.layers.7"),
        ("module._orig_mod.transformer.h.0.ln_1.bias", "transformer.h.0"),
        ("lm_head.weight", "lm_head"),
        ("0.weight", "0"),
        ("scale", "scale"),
    ],
)
def test_a_layer_is_what_is_numbered_or_else_a_module(name: str, layer: str) -> None:
    """Without what wraps the model."""
    assert layer_of(name) == layer


def test_layers_that_are_no_number_come_first() -> None:
    """In the order of the model; what is not known is left out."""
    norms = {"c": 1.0, "b": math.nan, "x": None, "a": math.inf, "d": 5.0}
    assert list(largest_norms(norms, 3)) == ["b", "a", "d"]
    assert largest_norms(norms, 0) == {}


@pytest.mark.parametrize("layers", [-1, True, 2.5])
def test_a_number_of_layers_is_a_whole_number(layers: Any) -> None:
    with pytest.raises(ConfigurationError, match="layer_norms"):
        trainmedic.connect("llm-1", layer_norms=layers)


class Outer:
    """An optimizer without PyTorch's hooks, around one that has them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self) -> None:
        self.inner.step()


@pytest.mark.parametrize("holds", [True, False])
def test_an_optimizer_without_hooks_ends_no_training(medic: trainmedic.Medic, holds: bool) -> None:
    """Its layers are shown if one that it steps has them."""
    model = Model()
    optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
    inner = optimizer.inner
    if not holds:
        del optimizer.inner
    norms = LayerNorms([model], [optimizer], medic)
    model(torch.ones(2, 4)).sum().backward()
    inner.step()
    norms.close()
    assert len(shown(medic)) == (3 if holds else 0)
