"""Checks of `attach` for parts that no checkpoint restores."""

from __future__ import annotations

import logging
from typing import Any, Mapping, Sequence

import torch
from torch import nn

from trainmedic.errors import ConfigurationError
from trainmedic.torch.carried_values import tensors_in
from trainmedic.torch.optimizer_states import inner_optimizers, is_zero_redundancy, parameters_of, state_of
from trainmedic.torch.state_parts import StateParts

log = logging.getLogger("trainmedic")


def check_parts(job: str, parts: StateParts, keeps_own: bool, carried: Sequence[Any] = ()) -> None:
    """Raise ConfigurationError for parts that do not belong together or cannot be saved.

    ``keeps_own``: the user's functions save them. ``carried``: other saved values.
    """
    _check_has_values(parts)
    held = {id(parameter) for module in parts.modules().values() for parameter in module.parameters()}
    for name, optimizer in parts.optimizer_parts().items():
        _check_form(name, optimizer)
        if held and not keeps_own:
            lost = [parameter for parameter in parameters_of(optimizer) if id(parameter) not in held]
            if lost:
                saved = _saved_outside_modules(parts, carried)
                lost = [each for each in lost if id(each) not in saved and _address(each) not in saved]
            _check_parameters(name, len(parameters_of(optimizer)), lost)
        if not any(parameter.requires_grad for parameter in parameters_of(optimizer)):
            log.warning("%s: no parameter of %s requires a gradient: nothing is trained", job, name)


def check_even_steps(parts: StateParts) -> None:
    """Raise ConfigurationError within ``join()`` of PyTorch's, which lets ranks end at different steps."""
    for name, module in parts.modules().items():
        if getattr(getattr(module, "_join_config", None), "enable", False):
            raise ConfigurationError(
                f"{name}: join() lets ranks take different numbers of steps, and a checkpoint would wait for ranks "
                "that have ended: give every rank as many batches, as DistributedSampler does, and leave out join()"
            )


def _check_has_values(parts: StateParts) -> None:
    for part, module in parts.modules().items():
        empty = [name for name, tensor in _tensors(module) if tensor.is_meta]
        if empty:
            raise ConfigurationError(
                f"{part}: {len(empty)} of its tensors, such as {empty[0]}, are on the meta device without values: "
                "call to_empty(), load or initialise the weights, and make the optimizer, before attach()"
            )


def _check_form(name: str, optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if not isinstance(getattr(optimizer, "param_groups", None), (list, tuple)):
        inner = [key for key, _ in inner_optimizers(optimizer)]
        advice = f"give the optimizer that it holds, its attribute {inner[0]}" if inner else _replacement(optimizer)
        raise ConfigurationError(f"{name}: a {kind} has no param_groups, which hold parameters and rates: {advice}")
    if is_zero_redundancy(optimizer) and getattr(optimizer, "_overlap_with_ddp", False):
        raise ConfigurationError(
            f"{name}: a {kind} with overlap_with_ddp=True steps during the backward pass, and its state cannot be "
            "replaced there: make it without overlap_with_ddp"
        )


def _replacement(optimizer: Any) -> str:
    attributes = getattr(optimizer, "__dict__", {}).items()
    holding = [name for name, value in attributes if isinstance(value, Mapping) and _holds_state(value)]
    state = f"its state ({', '.join(holding[:3])})" if holding else "its state"
    example = f"list(optimizer.{holding[0]}.values())" if holding else "[...]"
    return (
        "give an object with param_groups=[{'params': [...], 'lr': rate}], state_dict() and load_state_dict() in its "
        f"place, name {state} in also, by position and not by id(), such as also={{'moments': {example}}}, and set the "
        "rates that run.learning_rate(value) returns"
    )


def _holds_state(value: Mapping[Any, Any]) -> bool:
    return any(not isinstance(tensor, nn.Parameter) for tensor in tensors_in(value))


def _saved_outside_modules(parts: StateParts, carried: Sequence[Any]) -> set[int]:
    states = [state_of(part) for part in parts.by_name.values() if not isinstance(part, nn.Module)]
    saved: set[int] = set()
    for tensor in tensors_in([*states, *carried]):
        saved.update((id(tensor), _address(tensor)))
    return saved - {0}


def _check_parameters(name: str, count: int, lost: Sequence[torch.Tensor]) -> None:
    if count and len(lost) == count:
        raise ConfigurationError(
            f"{name}: none of its {count} parameters is one of the model's: it is the optimizer of another "
            "model, or was made before the model got these parameters; make it of model.parameters(). Copies in full "
            "precision that it moves in their place are named in also, such as also={'master': the list of them}"
        )
    if lost:
        raise ConfigurationError(
            f"{name}: {len(lost)} of its {count} parameters are in no given module, the first of "
            f"shape {tuple(lost[0].shape)}, so no checkpoint would hold them: pass their module in model or also, "
            "or name the parameters in also"
        )


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # without a storage
        return 0


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
