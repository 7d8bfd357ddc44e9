"""Catalogue of XIDs, the error codes of NVIDIA's driver."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from msgspec import Struct

_HARDWARE = frozenset({"reset_gpu", "restart_node"})
NOT_LISTED = "ask"  # action for codes that the catalogue lacks


class Xid(Struct, frozen=True):
    """``action`` is one of the data file's; ``meaning`` may be empty."""

    code: int
    action: str
    meaning: str = ""


@cache
def catalogue() -> dict[int, Xid]:
    data = tomllib.loads(resources.files(__package__).joinpath("xids.toml").read_text(encoding="utf-8"))
    return {int(code): Xid(int(code), **entry) for code, entry in data["codes"].items()}


def is_listed(code: int) -> bool:
    return code in catalogue()


def means_hardware(code: int) -> bool:
    """Return whether a GPU reset or node restart is needed."""
    return xid(code).action in _HARDWARE


def xid(code: int) -> Xid:
    return catalogue().get(code, Xid(code, NOT_LISTED))
