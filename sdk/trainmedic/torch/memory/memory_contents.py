"""What an in-memory checkpoint holds of a training: on each rank, all that this rank has of it.

Not here: the bytes (``snapshots``), the slots (``memory_checkpoints``).
"""

from __future__ import annotations

from typing import Any, Mapping, Protocol, Sequence

import torch

from trainmedic.torch.checkpoints.digests import state_tensors
from trainmedic.torch.checkpoints.state_digests import tensors_of_other_forms
from trainmedic.torch.optimizer_states import is_standard
from trainmedic.torch.state_parts import StateParts
from trainmedic.torch.tensor_names import plain_name


class MemoryContents(Protocol):
    """How the parts are taken, and put into place."""

    def meshes(self, parts: StateParts) -> Sequence[Any]:
        """The device meshes that tensors may be spread over, in the same order in each process of the training."""
        ...

    def held(self, parts: StateParts) -> Any:
        """What this rank has of the states; it shares memory with the parts."""
        ...

    def mismatch(self, parts: StateParts, held: Any) -> str:
        """Why `held` cannot be restored; empty if it can, as far as can be checked without trying."""
        ...

    def tensors(self, parts: StateParts, held: Any) -> Mapping[str, torch.Tensor]:
        """The parameters and the optimizers' states in it, by their names in `trainmedic.torch.checkpoints.digests`.

        Raises LookupError or TypeError where it is of another form than those names.
        """
        ...

    def put_back(self, parts: StateParts, held: Any) -> None:
        """Put what `held` gave into place."""
        ...


class WholeContents:
    """Of a training whose parts are whole on each rank."""

    def meshes(self, parts: StateParts) -> Sequence[Any]:
        return ()

    def held(self, parts: StateParts) -> Any:
        return parts.capture()

    def mismatch(self, parts: StateParts, held: Any) -> str:
        return parts.mismatch(held)

    def tensors(self, parts: StateParts, held: Any) -> Mapping[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for part, module in parts.modules().items():
            state = {plain_name(name): tensor for name, tensor in held[part].items()}
            names = [plain_name(name) for name, _ in module.named_parameters()]
            tensors.update((f"{part}.{name}", state[name]) for name in names)
        for part, optimizer in parts.optimizers().items():
            for number, state in held[part]["state"].items() if is_standard(optimizer) else ():
                tensors.update(state_tensors(f"{part}.{number}", state))
        return {**tensors, **tensors_of_other_forms(parts, held)}

    def put_back(self, parts: StateParts, held: Any) -> None:
        parts.restore(held)
