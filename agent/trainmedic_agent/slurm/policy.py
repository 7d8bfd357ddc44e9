"""The policy's part ``slurm``: without it the agent runs no command of Slurm."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from msgspec import Struct

from trainmedic_agent import mapping_reader
from trainmedic_agent.mapping_reader import FieldFault, MappingReader

READING = frozenset({"slurm.read", "slurm.list"})
"""Allowed by the part alone."""
CHANGING = (
    *("slurm.drain", "slurm.resume", "slurm.reboot", "slurm.reserve", "slurm.hold", "slurm.release"),
    *("slurm.requeue", "slurm.update", "slurm.signal", "slurm.cancel"),
)
COMMENT = "slurm.comment"
"""Sets a job's admin comment, in which the server marks its changes."""
ALSO_BY: Mapping[str, frozenset[str]] = {
    "slurm.resume": frozenset({"slurm.drain", "slurm.reboot"}),
    "slurm.release": frozenset({"slurm.hold"}),
    COMMENT: frozenset({"slurm.hold", "slurm.release", "slurm.requeue", "slurm.update"}),
}
"""Actions that are allowed together with others: an undo must not fail after its change."""


class SlurmPolicy(Struct, frozen=True):
    """- ``commands``: directory of scontrol and scancel
    - ``conf``: slurm.conf. None: where they look for it
    """

    commands: str = "/usr/bin"
    conf: str | None = None


def read_slurm(raw: object, faults: list[FieldFault]) -> SlurmPolicy:
    """After a fault, appended to `faults`, the result must not be used."""
    reader = MappingReader(("slurm",), raw, SlurmPolicy.__struct_fields__, faults)
    return SlurmPolicy(
        commands=reader.optional("commands", _path, SlurmPolicy().commands),
        conf=reader.optional("conf", _path, None),
    )


def _path(raw: object) -> str:
    path = mapping_reader.text(raw)
    if not path.startswith("/") or posixpath.normpath(path) != path or "\0" in path:
        raise ValueError(f"{path!r} must be an absolute path, such as {SlurmPolicy().commands}")
    return path
