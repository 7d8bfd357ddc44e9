"""State of an optimizer of any class.

- Each rank saves its own entries of a ``ZeroRedundancyOptimizer``.
- Some wrappers share ``param_groups`` or ``state`` with an inner optimizer, after a load too.
- A parameter's number is its position in the optimizer.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

import torch

_ZERO = "ZeroRedundancyOptimizer"
_OWN_MAPPINGS = ("state", "defaults")  # attributes of every optimizer


def is_zero_redundancy(part: Any) -> bool:
    # By name, because importing takes seconds.
    return any(kind.__name__ == _ZERO for kind in type(part).__mro__)


def state_of(part: Any) -> Any:
    """Return the state, sharing memory with the optimizer."""
    if not is_zero_redundancy(part):
        return part.state_dict()
    numbers = {parameter: number for number, parameter in enumerate(parameters_of(part))}
    state = {numbers[parameter]: dict(values) for parameter, values in part.optim.state.items()}
    groups = []
    for group in part.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [numbers[parameter] for parameter in group["params"]]})
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def load_state(part: Any, state: Any) -> None:
    """Restore `state_of`'s output. Raises errors of ``load_state_dict``."""
    if is_zero_redundancy(part):
        _load_zero_redundancy(part, state)
        return
    groups, own = _groups(part), getattr(part, "state", None)
    shared = [inner for _, inner in inner_optimizers(part) if groups is not None and _groups(inner) is groups]
    with_state = [inner for _, inner in inner_optimizers(part) if inner.state is own]
    part.load_state_dict(state)
    for inner in shared:
        if _groups(part) is not _groups(inner):
            part.param_groups = inner.param_groups
    for inner in with_state if own is not None else ():
        if part.state is inner.state:  # perhaps a property without a setter
            continue
        if inner.state is own:  # the wrapper loaded its own
            inner.state = part.state
        elif part.state is own:
            part.state = inner.state


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def copied_options(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        for options in options_of(optimizer)
    ]


def put_copied_options(optimizer: Any, copied: Sequence[Mapping[str, Any]]) -> None:
    """Set the groups' options to those copied, without later ones."""
    for group, options in zip(optimizer.param_groups, copied, strict=True):
        for key in group.keys() - options.keys() - {"params"}:
            del group[key]
    put_options(optimizer, optimizer.param_groups, copied)


def put_options(optimizer: Any, before: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Set the groups' options to ``saved``, in the tensors of ``before``."""
    for group, own, values in zip(optimizer.param_groups, before, saved, strict=True):
        for key, value in values.items():
            present = own.get(key)
            if key == "params":
                continue
            if isinstance(present, torch.Tensor) and present.shape == getattr(value, "shape", ()):
                with torch.no_grad():
                    present.copy_(torch.as_tensor(value))
                group[key] = present
            else:
                group[key] = value.clone() if isinstance(value, torch.Tensor) else value


def owned_numbers(part: Any) -> set[int]:
    """Return the numbers of the parameters that this rank updates."""
    owned = {parameter for group in part.optim.param_groups for parameter in group["params"]}
    return {number for number, parameter in enumerate(parameters_of(part)) if parameter in owned}


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def inner_optimizers(part: Any) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the optimizers in `part`'s attributes, lists and mappings, with names."""
    for name, value in getattr(part, "__dict__", {}).items():
        members: Mapping[Any, Any] = {}
        if isinstance(value, Mapping) and name not in _OWN_MAPPINGS:
            members = value
        elif isinstance(value, (list, tuple)) and name != "param_groups":
            members = dict(enumerate(value))
        if isinstance(value, torch.optim.Optimizer):
            yield name, value
        for key, member in members.items():
            if isinstance(member, torch.optim.Optimizer):
                yield f"{name}.{key}", member


def separate_optimizers(part: Any) -> dict[str, torch.optim.Optimizer]:
    """Return inner optimizers with a state of their own."""
    if is_zero_redundancy(part):
        return {}
    own = getattr(part, "state", None)
    return {name: inner for name, inner in inner_optimizers(part) if inner.state is not own}


def is_standard(part: Any) -> bool:
    """Return whether `live_state` has the whole state."""
    return isinstance(part, torch.optim.Optimizer) and not separate_optimizers(part)


def live_state(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """Return this rank's state by parameter, not a copy."""
    inner = optimizer.optim if is_zero_redundancy(optimizer) else optimizer  # type: ignore[attr-defined]
    state: Mapping[Any, Any] = inner.state
    return state


def _groups(part: Any) -> Any:
    return getattr(part, "param_groups", None)


def _load_zero_redundancy(part: Any, state: Mapping[str, Any]) -> None:
    # Only this rank's entries: PyTorch's own method would move the others to this rank's device.
    parameters, owned = parameters_of(part), owned_numbers(part)
    part.optim.state.clear()
    for number, values in state["state"].items():
        if number in owned:
            parameter = parameters[number]
            part.optim.state[parameter] = {key: _placed(value, parameter) for key, value in values.items()}
    for given, outer, inner in zip(state["param_groups"], part.param_groups, part.optim.param_groups, strict=True):
        settings = {key: value for key, value in given.items() if key != "params"}
        outer.update(settings)
        inner.update(settings)


def _placed(value: Any, parameter: torch.Tensor) -> Any:
    # A copy on the parameter's device; scalars stay on the CPU.
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)
