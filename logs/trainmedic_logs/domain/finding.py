"""Finding of a log rule: an observation, not a cause."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from trainmedic_core.target import LONGEST_NAME, Target

CLAIMED_JOB = "claimed_job"
"""Label: job that only a log file's path names. Playbooks do not use it."""
# In characters.
LONGEST_LINE = 500
LONGEST_VALUE = 256
LONGEST_STREAM = 4096
MOST_LABELS = 10
MOST_FIELDS = 32
RANK_LIMIT = 1_000_000  # ranks are below it
LARGEST_NUMBER = 1_000_000_000_000_000
LABEL_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z"

Id = Annotated[str, Meta(pattern=r"^[!-~]{1,128}\Z")]
"""Printable ASCII without blanks."""
Texts = Mapping[Annotated[str, Meta(pattern=LABEL_NAME)], Annotated[str, Meta(max_length=LONGEST_VALUE)]]
_Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
_Number = Annotated[int, Meta(ge=0, le=RANK_LIMIT)]  # also of attempts; the limit itself is accepted
_Short = Annotated[str, Meta(max_length=128)]


class Role(StrEnum):
    """Possible meaning of a line in a failure."""

    ROOT = "root"
    CASCADE = "cascade"
    """Consequence, which raises no alert."""
    CONFIRMATION = "confirmation"
    """Explains another finding, such as an OOM kill."""
    TEARDOWN = "teardown"
    """Printed during termination."""
    NOISE = "noise"


class CauseClass(StrEnum):
    GPU = "gpu"
    GPU_MEMORY = "gpu_memory"
    HOST_MEMORY = "host_memory"
    NETWORK = "network"
    STORAGE = "storage"
    DATA = "data"
    """Including the processes that read it."""
    CODE = "code"
    NUMERICS = "numerics"
    NODE = "node"
    """The machine, if nothing more exact is known."""
    PREEMPTION = "preemption"
    """Ended by a user or scheduler."""
    HANG = "hang"
    """A wait for another rank, for an unknown reason."""
    UNKNOWN = "unknown"


class TimeSource(StrEnum):
    LINE = "line"
    """Stated with a zone, or as time since boot."""
    ARRIVAL = "arrival"
    """Time of reading."""


class Origin(Struct, frozen=True):
    source: Annotated[str, Meta(min_length=1, max_length=64)]
    """``training``, ``launcher``, ``kernel``, ``slurm``, ``fabric-manager``, or a policy's."""
    node: _Name = ""
    """Empty for files of unknown origin."""
    job: _Name | None = None
    attempt: _Number | None = None  # from 1
    rank: _Number | None = None
    local_rank: _Number | None = None
    node_rank: _Number | None = None
    pod: _Name | None = None
    """``namespace/name``."""
    stream: Annotated[str, Meta(max_length=LONGEST_STREAM)] = ""
    """Path of the file, for people."""
    generation: str = ""
    """Distinguishes streams of one name."""


class Finding(Struct, frozen=True, rename={"time_source": "time", "is_over": "over"}):
    id: Id
    """Hash of stream and place, the same when read again."""
    rule: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
    role: Role
    cause: CauseClass
    target: Target
    """GPUs and nodes never come from a training's output."""
    origin: Origin
    first_at: datetime
    last_at: datetime
    """UTC, by the node's clock."""
    line: Annotated[str, Meta(max_length=LONGEST_LINE)]
    """First or decisive line, masked."""
    labels: Annotated[Texts, Meta(max_length=MOST_LABELS)] = field(default_factory=dict)
    """Part of the identity."""
    # Captured groups, or members of a record.
    fields: Annotated[Texts, Meta(max_length=MOST_FIELDS)] = field(default_factory=dict)
    ranks: frozenset[int] = frozenset()  # that printed its lines
    count: Annotated[int, Meta(ge=1, le=LARGEST_NUMBER)] = 1  # lines
    time_source: TimeSource = TimeSource.ARRIVAL
    clock_error: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds from Redis's clock."""
    is_over: bool = False  # its stream saw its end
    shape: _Short = ""
    """Hash without numbers, addresses and paths, to compare attempts."""


MOST_AROUND = 50
"""Excerpt lines on each side."""
LARGEST_EXCERPT = 256 * 1024  # bytes


class Excerpt(Struct, frozen=True):
    lines: Annotated[tuple[str, ...], Meta(min_length=1, max_length=2 * MOST_AROUND + 1)]
    """With prefixes, without line feeds."""
    at: Annotated[int, Meta(ge=0)]
    """Index of the finding's line."""
    number: Annotated[int, Meta(ge=0, le=LARGEST_NUMBER)] = 0
    """Number of `lines[0]`, from 1; 0 if unknown."""

    def within(self, most_bytes: int = LARGEST_EXCERPT) -> Excerpt:
        """Cut to `most_bytes`, farthest lines first."""
        sizes = [len(line.encode(errors="replace")) + 1 for line in self.lines]
        first, last, total = 0, len(sizes) - 1, sum(sizes)
        while total > most_bytes and first < last:
            if self.at - first >= last - self.at:
                total -= sizes[first]
                first += 1
            else:
                total -= sizes[last]
                last -= 1
        number = self.number + first if self.number else 0
        kept = self.lines[first : last + 1]
        if total > most_bytes:  # only the finding's line is left
            kept = (kept[0].encode(errors="replace")[:most_bytes].decode(errors="ignore"),)
        return Excerpt(kept, self.at - first, number)
