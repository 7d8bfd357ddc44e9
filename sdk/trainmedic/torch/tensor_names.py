"""The names of a module's tensors, compiled or not.

``torch.compile`` puts a module into another, so that ``_orig_mod.`` stands before or within the names in its state.
A checkpoint is to serve the same training with and without it. Who calls it: ``state_parts``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Iterable, Mapping

_COMPILED = "_orig_mod"


def plain_name(name: str) -> str:
    """The name that a tensor has where nothing is compiled."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def named_as(names: Iterable[str], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a module with its tensors named as in `names`, as far as only compiling makes the difference."""
    names = list(names)
    if state.keys() == set(names):
        return state
    wanted = {plain_name(name): name for name in names}
    renamed = OrderedDict((wanted.get(plain_name(name), name), value) for name, value in state.items())
    # PyTorch keeps the versions of the modules' formats beside the tensors, by the names of the modules.
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        modules = {plain_name(module): module for name in names for module in _modules_above(name)}
        renamed._metadata = {  # type: ignore[attr-defined]
            modules.get(plain_name(module), module): version for module, version in versions.items()
        }
    return renamed


def _modules_above(name: str) -> Iterable[str]:
    """The names of the modules in which a tensor lies, the innermost last."""
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(len(parts)))
