"""Checkpointed parts of a plain PyTorch training."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Iterator, Mapping

import torch
from torch import nn

from trainmedic.errors import ConfigurationError, described
from trainmedic.torch.optimizer_attributes import OptimizerAttributes
from trainmedic.torch.optimizer_states import copied_options, load_state, put_copied_options, state_of
from trainmedic.torch.tensor_names import named_as, plain_name

log = logging.getLogger("trainmedic")

ATTRIBUTES = ".attributes"  # key, next to the parts' names, of state outside any ``state_dict``


class StateParts:
    """Objects with ``state_dict`` and ``load_state_dict``.

    Members of a list or dict are named ``model.0`` or ``model.key``.
    """

    def __init__(self, **objects: Any) -> None:
        self.by_name: dict[str, Any] = {}
        for name, value in objects.items():
            for member, part in _members(name, value):
                if isinstance(part, type):
                    raise ConfigurationError(f"{member}: {part.__name__} is a class; pass an instance")
                if not (callable(getattr(part, "state_dict", None)) and hasattr(part, "load_state_dict")):
                    raise ConfigurationError(
                        f"{member}: a {type(part).__name__} has no state_dict and load_state_dict to be saved with"
                    )
                if member in self.by_name:
                    raise ConfigurationError(f"{member}: two objects have this name; give the one in also another")
                self.by_name[member] = part
        self.attributes = OptimizerAttributes(self.by_name)

    def capture(self) -> dict[str, Any]:
        """Return the states, sharing memory with the parts."""
        states = {name: state_of(part) for name, part in self.by_name.items()}
        attributes = self.attributes.capture()
        return {**states, ATTRIBUTES: attributes} if attributes else states

    def mismatch(self, states: Mapping[str, Any]) -> str:
        """Return why `capture`'s output cannot be restored here, or ""."""
        for name, part in self.by_name.items():
            if name not in states:
                return f"it has no {name}"
            try:
                difference = _difference(part, states[name])
            except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
                difference = described(error)
            if difference:
                return f"{name}: {difference}"
        return self.attributes.mismatch(states.get(ATTRIBUTES, {}))

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore `capture`'s output. An error may leave some parts restored."""
        self.attributes.restore(states.get(ATTRIBUTES, {}))
        options: dict[str, list[dict[str, Any]]] = {}
        for name, part in self.by_name.items():
            state = states[name]
            if isinstance(part, nn.Module):
                part.load_state_dict(named_as(part.state_dict(), state))
            elif _was_disabled(part, state):
                log.warning("%s was disabled when the checkpoint was written; it starts afresh", name)
            else:
                load_state(part, state)
                if name in self.optimizer_parts():
                    options[name] = copied_options(part)
        # Schedulers such as fairseq's set the present step's rate when they are loaded.
        for name, saved in options.items():
            put_copied_options(self.by_name[name], saved)

    def buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        buffers = {}
        for name, module in self.modules().items():
            saved = module.state_dict().keys()
            buffers[name] = {plain_name(key): buffer for key, buffer in module.named_buffers() if key in saved}
        return buffers

    def restore_buffers(self, held: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, module in self.modules().items():
                buffers = {plain_name(key): buffer for key, buffer in held.get(name, {}).items()}
                for key, buffer in module.named_buffers():
                    if plain_name(key) in buffers:
                        buffer.copy_(buffers[plain_name(key)])

    def extra_states(self) -> dict[str, dict[str, Any]]:
        """Return the modules' ``get_extra_state`` by part and module, sharing memory."""
        return {
            name: {own: _detached(each.get_extra_state()) for own, each in _with_extra_state(module)}
            for name, module in self.modules().items()
        }

    def restore_extra_states(self, held: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore `extra_states`' output; the modules keep the given objects."""
        for name, module in self.modules().items():
            for own, each in _with_extra_state(module):
                if own in held.get(name, {}):
                    each.set_extra_state(held[name][own])

    def discard_gradients(self) -> None:
        for part in self.by_name.values():
            if hasattr(part, "zero_grad"):
                part.zero_grad()
            for scaler in _scalers(part):
                with contextlib.suppress(AssertionError):  # nothing scaled yet
                    scaler.update(scaler.get_scale())  # setting a scale clears its record

    def modules(self) -> dict[str, nn.Module]:
        return {name: part for name, part in self.by_name.items() if isinstance(part, nn.Module)}

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name: part for name, part in self.by_name.items() if isinstance(part, torch.optim.Optimizer)}

    def optimizer_parts(self) -> dict[str, Any]:
        """Return optimizers, and parts named ``optimizer``."""
        return {
            name: part
            for name, part in self.by_name.items()
            if isinstance(part, torch.optim.Optimizer)
            or (name.partition(".")[0] == "optimizer" and not isinstance(part, nn.Module))
        }


def is_sharded(parts: StateParts) -> bool:
    parameters = (parameter for module in parts.modules().values() for parameter in module.parameters())
    return any(hasattr(parameter, "full_tensor") for parameter in parameters)


def is_wrapped_by_fsdp1(parts: StateParts) -> bool:
    # By name, because importing takes seconds.
    modules = (module for part in parts.modules().values() for module in part.modules())
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in modules)


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"{name}.{key}", part
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield f"{name}.{number}", part
    else:
        yield name, value


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, each in module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield plain_name(name), each


def _detached(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach()
    if type(state) is dict:
        return {key: _detached(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_detached, state))
    return state


def _difference(part: Any, held: Any) -> str:
    if isinstance(part, nn.Module):
        present = part.state_dict()
        return _difference_of_tensors(present, named_as(present, held))
    if isinstance(part, torch.optim.Optimizer):
        saved_sizes = [len(group["params"]) for group in held["param_groups"]]
        if saved_sizes != [len(group["params"]) for group in part.param_groups]:
            return "other parameter groups"
    return ""


def _difference_of_tensors(present: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    if present.keys() != held.keys():
        odd = sorted(present.keys() ^ held.keys())
        return f"{len(odd)} names differ, such as {odd[0]}"
    for key, value in present.items():
        if isinstance(value, torch.Tensor) and getattr(held[key], "shape", None) != value.shape:
            return f"{key} has another shape"
    return ""


def _was_disabled(part: Any, state: Any) -> bool:
    """Return whether a disabled gradient scaler wrote ``state``, and the present one is enabled."""
    return state == {} and any(scaler.is_enabled() for scaler in _scalers(part))


def _scalers(part: Any) -> Iterator[torch.amp.GradScaler]:
    for candidate in (part, *getattr(part, "__dict__", {}).values()):
        if isinstance(candidate, torch.amp.GradScaler):
            yield candidate
