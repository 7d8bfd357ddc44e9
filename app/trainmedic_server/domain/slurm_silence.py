from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct, field


class Withheld(Struct, frozen=True):
    """What keeps nodes and jobs of Slurm from work, by their names."""

    drained: Mapping[str, str] = field(default_factory=dict)  # reason by node
    reserved: Mapping[str, str] = field(default_factory=dict)  # active reservation by node
    held: Mapping[str, str] = field(default_factory=dict)  # admin comment by job


class SlurmSilence(Struct, frozen=True):
    """An interruption, after which slurmctld may have lost its last changes."""

    began: datetime  # last answered reading before it (aware UTC)
    ended: datetime
    after: Withheld  # by the first reading after it
