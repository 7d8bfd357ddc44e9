"""Names of a module's tensors without ``torch.compile``'s ``_orig_mod.``."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Iterable, Mapping

_COMPILED = "_orig_mod"


def plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def named_as(names: Iterable[str], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename a state's tensors if only compilation differs."""
    names = list(names)
    if state.keys() == set(names):
        return state
    wanted = {plain_name(name): name for name in names}
    renamed = OrderedDict((wanted.get(plain_name(name), name), value) for name, value in state.items())
    # PyTorch stores the modules' format versions by module name.
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        modules = {plain_name(module): module for name in names for module in _modules_above(name)}
        renamed._metadata = {  # type: ignore[attr-defined]
            modules.get(plain_name(module), module): version for module, version in versions.items()
        }
    return renamed


def _modules_above(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(len(parts)))
