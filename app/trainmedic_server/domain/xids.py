"""What the error codes of NVIDIA's driver mean: the catalogue of XIDs, from the data file ``xids.toml`` beside this.

Who asks: the agent's metrics. Not here: which of them have come (``ports.gpus``, ``agent.gpu_record``).
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from msgspec import Struct

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


def xid(code: int) -> Xid:
    """Return what a code means; one that the catalogue does not list asks for somebody to look."""
    return catalogue().get(code, Xid(code, NOT_LISTED))
