"""Names of log sources, with few imports because every agent loads it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

KERNEL_SOURCES = frozenset({"kernel", "fabric-manager"})
"""Sources that trainings cannot write, so their lines may concern a GPU, or a node with jobs."""
TEXT_SOURCES = ("training", "launcher", "slurm")
SOURCES = (*TEXT_SOURCES, *sorted(KERNEL_SOURCES))
"""Policies may add others."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z")
_ALIKE = 0.75  # similarity from 0 to 1


def misspelt(name: str, known: Sequence[str]) -> str | None:
    """None without a similar name, or if a policy's name extends a known one."""
    if any(each in name for each in known):
        return None
    written = {each.replace("_", "-"): each for each in known}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), written, n=1, cutoff=_ALIKE)
    return written[near[0]] if near else None


def fault_of_source(name: str) -> str | None:
    """None for a valid name."""
    meant = misspelt(name, SOURCES)
    if meant is not None:
        return f"there is no {name!r}; did you mean {meant!r}?"
    if _NAME.match(name):
        return None
    return f"{name!r} is not a valid source; use at most 63 lower-case letters, digits and '-'"
