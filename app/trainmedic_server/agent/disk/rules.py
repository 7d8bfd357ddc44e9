"""What a cleaning rule says. Rules come from the agent's policy alone; a command can only name them.

**Which entries.** Those below one of ``roots`` whose path from there is matched by one of ``globs`` and by
none of ``exclude`` (`globs` has the syntax). Each root is walked on its own filesystem: mount points below
it, symbolic links, devices, sockets and pipes are neither entered nor touched.

- Kind ``files``: regular files. Directories stay, also when they have become empty. Never inside a
  checkpoint directory, whatever the patterns say; see `checkpoints` for how one is known.
- Kind ``checkpoints``: directories, each deleted with all that is in it or left whole. What is matched and
  is not known to be a checkpoint is left.

**Conditions**, all of which must hold:

- ``min_age``: nobody used it for this long. ``age_by: used`` (the default) takes the latest of the times of
  its last write, last change (of mode, owner, name or links) and last read; ``changed`` leaves out reading,
  ``modified`` takes writing alone, as ``find -mtime`` does: then what was unpacked or copied with its old
  times is old at once. For a checkpoint it is the latest of all that is in it. At least a minute, except
  for ``do: truncate``: a log that is being written is always young, so there it may be 0.
- ``keep_newest``: the N most recently modified of the matched entries in each directory stay, whatever
  their age and size. Of checkpoints never fewer than two complete ones stay.
- ``min_size``, ``max_size``: bytes that it takes on the disk, both included, so a sparse file is as small
  as what is stored of it.
- ``when_free_below``: the rule works on a root only if less than this percentage of its filesystem is
  available when the rule's turn comes.
- It is not open in any process (``do: truncate`` excepted), has no other name by a hard link, and is not
  pinned.

**Order and end.** The rules of a command work in its order; each takes the oldest first, over all its roots
together, and stops at a filesystem as soon as the free space that the command asks for is reached there.
It also stops at the command's deadline, and when the policy's or its own ``max_files`` or ``max_bytes``
are used up; something that is too large for the bytes that are left is left, and the next one is tried.

**Deed.** ``delete`` takes the name away. ``truncate`` empties the file and keeps its name, for logs whose
writer holds them open; see `removal`.

Not here: reading this from a file (``reading``), or doing it (``cleaner``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

from trainmedic_server.agent.disk.globs import Glob


class Kind(StrEnum):
    FILES = "files"
    CHECKPOINTS = "checkpoints"


class Deed(StrEnum):
    DELETE = "delete"
    TRUNCATE = "truncate"


class AgeBy(StrEnum):
    USED = "used"
    CHANGED = "changed"
    MODIFIED = "modified"


YOUNGEST = timedelta(minutes=1)
"""The least ``min_age`` of a rule that deletes."""
KEPT_CHECKPOINTS = 2
"""So many complete checkpoints of a directory stay, whatever a rule says."""
MOST_KEPT = 1000
MAX_FILES = 100_000
"""Files per command where the policy says nothing: some minutes' work."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; this module says what each field means."""

    name: str
    roots: tuple[str, ...]
    globs: tuple[Glob, ...]
    min_age: timedelta
    exclude: tuple[Glob, ...] = ()
    kind: Kind = Kind.FILES
    do: Deed = Deed.DELETE
    age_by: AgeBy = AgeBy.USED
    keep_newest: int = 0
    min_size: int | None = None
    max_size: int | None = None
    when_free_below: float | None = None
    max_files: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Cleaning:
    """The ``cleaning`` part of a policy: its rules by name, and what bounds every command.

    ``owners`` are the numeric ids of the users to whom a root may belong, beside root and the agent's own.
    ``max_files`` and ``max_bytes`` are for one command, all its rules together; a file in a checkpoint
    counts like any other.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict)
    owners: frozenset[int] = frozenset()
    max_files: int = MAX_FILES
    max_bytes: int | None = None
