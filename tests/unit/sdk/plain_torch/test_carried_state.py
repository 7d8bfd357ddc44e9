"""Carried state that was restored counts as compared only if it was read again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainmedic.torch.carried_state import CarriedState, CarriedValue
from trainmedic.torch.carried_values import tensors_in
from trainmedic.torch.state_parts import StateParts
from trainmedic.trainer.held_values import NotPlain, packed


@pytest.mark.parametrize(("kept", "outcome"), [([1], {"compared": 1, "agreed": 1}), ([object()], {})])
def test_what_cannot_be_read_again_does_not_agree(kept: list[Any], outcome: dict[str, int]) -> None:
    """A setter of the user may leave something else."""
    values: list[Any] = [1]

    def put(_: Any) -> None:
        values[:] = kept

    state = CarriedState(named={"buffer": CarriedValue(lambda: values, put)})
    assert state.put_back(state.take()) == outcome


def test_containers_that_hold_themselves_are_no_error() -> None:
    """Such as a tree whose nodes know their parents."""
    model = nn.Linear(2, 2)
    tree: dict[str, Any] = {"children": [{"value": torch.ones(1)}]}
    tree["children"][0]["parent"] = tree
    plain: list[Any] = [1]
    plain.append(plain)
    model.tree, model.plain = tree, plain
    later: list[Any] = [1]
    model.later = later
    state = CarriedState(StateParts(model=model))
    state.record_start()
    later.append(later)
    assert list(tensors_in(tree)) == [torch.ones(1)]
    assert state.take() == {}


def test_an_expanded_tensor_is_restored() -> None:
    """Its elements share memory, so it cannot be written to."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 3).expand(4, 3), persistent=False)
    state = CarriedState(StateParts(model=model))
    state.record_start()
    held = state.take()
    model.mask = present = torch.zeros(1, 3).expand(4, 3)
    assert state.put_back(held) == {"compared": 1, "agreed": 1}
    assert torch.equal(model.mask, torch.ones(4, 3))
    assert model.mask is present  # in place, without memory for all elements


def test_a_tensor_whose_elements_differ_replaces_an_expanded_one() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.arange(6.0).view(2, 3), persistent=False)
    state = CarriedState(StateParts(model=model))
    state.record_start()
    held = state.take()
    model.mask = torch.zeros(1, 3).expand(2, 3)
    assert state.put_back(held) == {"compared": 1, "agreed": 1}
    assert torch.equal(model.mask, torch.arange(6.0).view(2, 3))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["nested", "quantized"])
def test_a_tensor_without_plain_memory_is_not_carried(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Reading its memory would be an error, or end the process."""
    model = nn.Linear(2, 2)
    if kind == "nested":
        model.kept = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    else:
        model.kept = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    state = CarriedState(StateParts(model=model))
    state.record_start()
    held = state.take()
    assert "model.kept is not in checkpoints" in caplog.text
    assert (held, state.put_back(held)) == ({}, {})
    with pytest.raises(NotPlain):
        packed(model.kept)


def test_an_array_of_another_byte_order_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Such as one from a file of the MNIST data set."""
    array = np.zeros(2, dtype=">i4")
    model = nn.Linear(2, 2)
    model.kept = [array]
    state = CarriedState(StateParts(model=model), {"own": CarriedValue(lambda: array, None)})
    state.record_start()
    assert state.take() == {}
    assert "also.own is not in checkpoints: a ndarray" in caplog.text
    with pytest.raises(NotPlain):
        packed(array)


@pytest.mark.parametrize("present", [None, random.Random(1)])
def test_a_generator_that_is_gone_is_told_of(present: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As in a resume by another version of the script; the training goes on without it."""
    model = nn.Linear(2, 2)
    model.noise = torch.Generator()
    held = CarriedState(StateParts(model=model)).take()
    assert list(held) == ["model.noise"]
    later = nn.Linear(2, 2)
    later.noise = present
    CarriedState(StateParts(model=later)).put_back(held)
    assert "the checkpoint holds carried state that is no longer there: model.noise" in caplog.text


def test_without_a_generator_the_values_next_to_it_are_restored() -> None:
    kept = {"noise": random.Random(1), "seen": 3}
    named = {"kept": CarriedValue(lambda: kept, None)}
    held = CarriedState(named=named).take()
    kept.clear()
    kept["seen"] = 5
    outcome = CarriedState(named=named).put_back(held)
    assert kept["seen"] == 3
    assert outcome == {"compared": 1, "agreed": 0, "different": "also.kept"}
