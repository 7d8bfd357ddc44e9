"""Catalogue of the XIDs, the error codes of NVIDIA's driver, from the data file ``xids.toml`` in this folder.

Callers: the agent's metrics, log rules, and the proof that playbooks require (``proof``). Not here: which XIDs have
occurred (``trainmedic_agent.ports.gpus``, ``trainmedic_agent.gpu_record``).
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from msgspec import Struct

_HARDWARE = frozenset({"reset_gpu", "restart_node"})
NOT_LISTED = "ask"
"""The action for a code that the catalogue does not list: somebody has to look."""


class Xid(Struct, frozen=True):
    """``action`` is one of those at the top of the data file; ``meaning`` a sentence, empty where it gives none."""

    code: int
    action: str
    meaning: str = ""


@cache
def catalogue() -> dict[int, Xid]:
    """Return every code that the data file lists."""
    data = tomllib.loads(resources.files(__package__).joinpath("xids.toml").read_text(encoding="utf-8"))
    return {int(code): Xid(int(code), **entry) for code, entry in data["codes"].items()}


def is_listed(code: int) -> bool:
    """Return whether the data file lists a code."""
    return code in catalogue()


def means_hardware(code: int) -> bool:
    """Return whether a code means broken hardware: the GPU works again only after its reset or a restart of the
    node."""
    return xid(code).action in _HARDWARE


def xid(code: int) -> Xid:
    """Return what a code means; one that the catalogue does not list asks for somebody to look."""
    return catalogue().get(code, Xid(code, NOT_LISTED))
