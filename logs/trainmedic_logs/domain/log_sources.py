"""Whose lines a log holds: the names of sources. Light, because every agent loads it with its policy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

KERNEL_SOURCES = frozenset({"kernel", "fabric-manager"})
"""Sources that no training can write to. Of these lines alone a finding can be about a node or a GPU; what another
source prints is about its job, whatever it says."""
TEXT_SOURCES = ("training", "launcher", "slurm")
SOURCES = (*TEXT_SOURCES, *sorted(KERNEL_SOURCES))
"""The names that each agent knows; a policy may give others to files of its own."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z")
_ALIKE = 0.75
"""From so much likeness to a known name on another one is that, misspelt; a name of one's own is less like it."""


def misspelt(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that was probably meant; None for a known one, and for one of somebody's own, which may
    also have a known one in it: ``training-eval``, ``slurmd``."""
    if any(each in name for each in known):
        return None
    written = {each.replace("_", "-"): each for each in known}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), written, n=1, cutoff=_ALIKE)
    return written[near[0]] if near else None


def fault_of_source(name: str) -> str | None:
    """Return what is wrong with a name, for a person; None where nothing is."""
    meant = misspelt(name, SOURCES)
    if meant is not None:
        return f"there is no {name!r}; did you mean {meant!r}?"
    return None if _NAME.match(name) else f"{name!r} is no source; a name has small letters, digits and '-', at most 63"
