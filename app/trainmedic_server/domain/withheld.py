from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class Withheld(Struct, frozen=True):
    """What keeps nodes and jobs of Slurm from work, by their names."""

    drained: Mapping[str, str] = field(default_factory=dict)  # reason by node
    reserved: Mapping[str, str] = field(default_factory=dict)  # active reservation by node
    held: Mapping[str, str] = field(default_factory=dict)  # admin comment by job
