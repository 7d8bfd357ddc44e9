"""Attributes of optimizers that become tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainmedic.torch.optimizer_attributes import OptimizerAttributes


class Averaging(torch.optim.SGD):
    """Has numbers until its first step, and tensors afterwards."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
        self.average: Any = 0.0
        self.last_two: Any = [0.0, 0.0]


@pytest.mark.parametrize("name", ["average", "last_two"])
def test_a_number_that_became_a_tensor_is_kept(name: str) -> None:
    optimizer = Averaging()
    attributes = OptimizerAttributes({"optimizer": optimizer})
    tensor = torch.tensor([1.0, 2.0])
    setattr(optimizer, name, tensor if name == "average" else [tensor, tensor])
    held = attributes.capture()
    assert list(held["optimizer"]["values"]) == [name]
    setattr(optimizer, name, 0.0 if name == "average" else [0.0, 0.0])
    attributes.restore(held)
    restored = getattr(optimizer, name)
    assert torch.equal(restored if name == "average" else restored[1], tensor)


def test_containers_that_hold_themselves_are_left_out() -> None:
    # Such as a tree whose nodes know their parents.
    optimizer = Averaging()
    tree: dict[str, Any] = {"children": [{}]}
    tree["children"][0]["parent"] = tree
    optimizer.last_two = tree
    attributes = OptimizerAttributes({"optimizer": optimizer})
    optimizer.average = 1.0
    held = attributes.capture()
    assert held["optimizer"]["values"] == {"average": 1.0}
    attributes.restore(held)
    assert optimizer.last_two is tree
