"""Contents of an in-memory checkpoint."""

from __future__ import annotations

from typing import Any, Mapping, Protocol, Sequence

import torch

from trainmedic.torch.checkpoints.digests import state_tensors
from trainmedic.torch.checkpoints.state_digests import nonstandard_tensors
from trainmedic.torch.optimizer_states import is_standard
from trainmedic.torch.state_parts import StateParts
from trainmedic.torch.tensor_names import plain_name


class MemoryContents(Protocol):
    def meshes(self, parts: StateParts) -> Sequence[Any]:
        """Return device meshes, in the same order in each process."""
        ...

    def capture(self, parts: StateParts) -> Any:
        """Return the states, sharing memory with the parts."""
        ...

    def mismatch(self, parts: StateParts, held: Any) -> str:
        """Return why ``held`` cannot be restored, or ""."""
        ...

    def tensors(self, parts: StateParts, held: Any) -> Mapping[str, torch.Tensor]:
        """Return tensors by digest name. Raises LookupError or TypeError for another structure."""
        ...

    def put_back(self, parts: StateParts, held: Any) -> None: ...


class WholeContents:
    def meshes(self, parts: StateParts) -> Sequence[Any]:
        return ()

    def capture(self, parts: StateParts) -> Any:
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
        return {**tensors, **nonstandard_tensors(parts, held)}

    def put_back(self, parts: StateParts, held: Any) -> None:
        parts.restore(held)
