"""What a checkpoint of a plain PyTorch training consists of: the model, the optimizer, whatever keeps a state.

Not here: the learning rate's scale and the place in the data, which are the run's (``run``), and files
(``storage``).
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

import torch
from torch import nn

from trainmedic.errors import ConfigurationError


class StateParts:
    """Objects with ``state_dict`` and ``load_state_dict``, by name. ``model`` and ``optimizer`` are the first two.

    Each may be one object, or a list or dict of several.
    """

    def __init__(self, **given: Any) -> None:
        self.by_name: dict[str, Any] = {}
        for name, one in given.items():
            for member, part in _members(name, one):
                if not (callable(getattr(part, "state_dict", None)) and hasattr(part, "load_state_dict")):
                    raise ConfigurationError(
                        f"{member}: a {type(part).__name__} has no state_dict and load_state_dict to be saved with"
                    )
                self.by_name[member] = part

    def capture(self) -> dict[str, Any]:
        """The states. They share memory with the parts: write them before training goes on."""
        return {name: part.state_dict() for name, part in self.by_name.items()}

    def misfit(self, states: Mapping[str, Any]) -> str:
        """Why `states` cannot be restored, as far as that can be told without trying; empty where they can."""
        for name, part in self.by_name.items():
            if name not in states:
                return f"it has no {name}"
            try:
                wrong = _difference(part, states[name])
            except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                return f"{name}: {wrong}"
        return ""

    def restore(self, states: Mapping[str, Any]) -> None:
        """Load into place."""
        for name, part in self.by_name.items():
            part.load_state_dict(states[name])

    def buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """The modules' buffers by the names of module and buffer, but for those that are not part of its state."""
        found = {}
        for name, module in self._modules():
            kept = module.state_dict().keys()
            found[name] = {key: one for key, one in module.named_buffers() if key in kept}
        return found

    def restore_buffers(self, held: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Into place, those that there still are."""
        with torch.no_grad():
            for name, module in self._modules():
                for key, buffer in module.named_buffers():
                    if key in held.get(name, ()):
                        buffer.copy_(held[name][key])

    def forget_gradients(self) -> None:
        """Those of an abandoned or half-done step, which may be NaN."""
        for part in self.by_name.values():
            if hasattr(part, "zero_grad"):
                part.zero_grad()
            if isinstance(part, torch.amp.GradScaler):
                # Which optimizers it has unscaled in a step that did not come to its end.
                part._per_optimizer_states.clear()

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, one) for name, one in self.by_name.items() if isinstance(one, nn.Module))


def is_sharded(parts: StateParts) -> bool:
    """Whether a parameter of any part is spread over ranks."""
    return any(hasattr(one, "full_tensor") for module in _modules(parts) for one in module.parameters())


def is_wrapped_by_fsdp1(parts: StateParts) -> bool:
    """By its name: to import the class takes seconds, which a training without it need not spend."""
    return any(
        type(one).__name__ == "FullyShardedDataParallel" for module in _modules(parts) for one in module.modules()
    )


def _modules(parts: StateParts) -> list[nn.Module]:
    return [one for one in parts.by_name.values() if isinstance(one, nn.Module)]


def _members(name: str, given: Any) -> Iterator[tuple[str, Any]]:
    if given is None:
        return
    if isinstance(given, Mapping):
        for key, one in given.items():
            yield f"{name}.{key}", one
    elif isinstance(given, (list, tuple)):
        for number, one in enumerate(given):
            yield f"{name}.{number}", one
    else:
        yield name, given


def _difference(part: Any, held: Any) -> str:
    if isinstance(part, nn.Module):
        return _other_shape(part.state_dict(), held)
    if isinstance(part, torch.optim.Optimizer):
        sizes = [len(group["params"]) for group in held["param_groups"]]
        return "other parameter groups" if sizes != [len(group["params"]) for group in part.param_groups] else ""
    return ""


def _other_shape(present: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    if present.keys() != held.keys():
        odd = sorted(present.keys() ^ held.keys())
        return f"{len(odd)} names differ, such as {odd[0]}"
    for key, value in present.items():
        if isinstance(value, torch.Tensor) and getattr(held[key], "shape", None) != value.shape:
            return f"{key} has another shape"
    return ""
