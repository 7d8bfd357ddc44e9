"""Tensors in an optimizer's groups, such as a learning rate for ``torch.compile``, which a loop may hold as well.

``load_state_dict`` puts other tensors in their place. Then the loop moves a rate that the optimizer no longer uses.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch


def hold(optimizers: Sequence[Any]) -> Callable[[], None]:
    """Return what puts the present tensors back into the groups after a load, with the values that were loaded."""
    held = [
        (optimizer, number, key, value)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, torch.Tensor)
    ]

    def put_back() -> None:
        for optimizer, number, key, tensor in held:
            group = optimizer.param_groups[number]
            loaded = group.get(key)
            if loaded is not tensor and loaded is not None:
                with torch.no_grad():
                    tensor.copy_(torch.as_tensor(loaded))
                group[key] = tensor

    return put_back
