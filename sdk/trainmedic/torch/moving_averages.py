"""Moving averages of a model's parameters, each updated in the way of the library that it comes from.

Not here: which model an average follows, and when it is updated (``steps``).
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

from trainmedic.errors import ConfigurationError

_METHODS = ("update", "step")


def update_average(ema: Any, model: Any) -> None:
    """Move an average on: PyTorch's ``update_parameters(model)``, or what other libraries have instead, which is
    ``update(model)``, ``update(parameters)``, ``step(parameters)`` or ``update()``. Raises ConfigurationError.
    """
    if hasattr(ema, "update_parameters"):
        ema.update_parameters(model)
        return
    name = next((name for name in _METHODS if hasattr(ema, name)), None)
    if name is None:
        raise ConfigurationError(f"step.update() does not know how a {type(ema).__name__} is updated: do it yourself")
    update: Callable[..., Any] = getattr(ema, name)
    first = next(iter(inspect.signature(update).parameters.values()), None)
    if first is not None and first.name.startswith("param"):
        update(model.parameters())
    elif first is None or first.default is not first.empty:
        update()  # it holds the model that it follows
    else:
        update(model)
