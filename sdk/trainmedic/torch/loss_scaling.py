"""Gradient scalers of a training in mixed precision: PyTorch's, switched on or off, and those that wrap one.

Only what PyTorch documents is used, for a scaler that is switched off lacks nearly all of its attributes. Not here:
scaling and stepping (``steps``), saving and loading (``state_parts``, which calls this).
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch


def drop_noted_steps(part: Any) -> None:
    """Let the gradient scaler of `part`, if it has one, forget which optimizers it has unscaled in the present step.

    It refuses to unscale twice in one step, and the step that was abandoned has no end at which it would forget.
    """
    for scaler in _scalers(part):
        with contextlib.suppress(AssertionError):  # it has not scaled anything yet, and so has noted nothing
            scaler.update(scaler.get_scale())  # setting a scale, and be it the present one, makes it forget


def begins_anew(part: Any, state: Any) -> bool:
    """Whether `state` is that of a gradient scaler that was switched off, and the one of `part` is switched on.

    Such a state is empty, and loading it would raise: the scaler begins with the scale that the script has given it.
    """
    return state == {} and any(scaler.is_enabled() for scaler in _scalers(part))


def _scalers(part: Any) -> Iterator[torch.amp.GradScaler]:
    """The gradient scaler that `part` is, or those that it holds, as timm's scaler and Accelerate's optimizer do."""
    for candidate in (part, *getattr(part, "__dict__", {}).values()):
        if isinstance(candidate, torch.amp.GradScaler):
            yield candidate
