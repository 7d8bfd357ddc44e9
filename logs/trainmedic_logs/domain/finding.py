"""What a log rule has found: the value that travels from where a line was read to the diagnosis and the alert.

A matched line is an observation and no cause. What it can mean is its role: of 512 ranks that time out none is the
culprit, so a cascade raises no alert of its own.

The bounds in the types hold for values from elsewhere, which ``finding_codec`` reads; making a value checks nothing.

Who makes findings: the matcher of log rules (``logs``). Not here: alerts from findings, and what they mean together.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from trainmedic_core.target import LONGEST_NAME, Target

CLAIMED_JOB = "claimed_job"
"""Label with the job that only a log file names, without proof that it runs on the file's node. It is part of the
identity, so each claimed job has its own findings. No playbook finds a job by it."""
LONGEST_LINE = 500
"""Characters of a finding's line."""
LONGEST_VALUE = 256
"""Characters of a label's or a field's value."""
LONGEST_STREAM = 4096
MOST_LABELS = 10
MOST_FIELDS = 32
LARGEST_RANK = 1_000_000
LARGEST_NUMBER = 1_000_000_000_000_000
LABEL_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z"

Id = Annotated[str, Meta(pattern=r"^[!-~]{1,128}\Z")]
"""Of a finding or a process: printable ASCII characters without blanks."""
Texts = Mapping[Annotated[str, Meta(pattern=LABEL_NAME)], Annotated[str, Meta(max_length=LONGEST_VALUE)]]
_Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
_Number = Annotated[int, Meta(ge=0, le=LARGEST_RANK)]
_Short = Annotated[str, Meta(max_length=128)]


class Role(StrEnum):
    """What a line can be in a failure."""

    ROOT = "root"
    """It can be where the failure began."""
    CASCADE = "cascade"
    """It follows from something else, such as another rank that is gone."""
    CONFIRMATION = "confirmation"
    """It explains another finding, for example by naming the process that was killed, out of memory."""
    TEARDOWN = "teardown"
    """It is printed while everything ends."""
    NOISE = "noise"
    """It means nothing, however it reads."""


class CauseClass(StrEnum):
    """What kind of thing failed."""

    GPU = "gpu"
    GPU_MEMORY = "gpu_memory"
    """The job asked for more than the card has."""
    HOST_MEMORY = "host_memory"
    NETWORK = "network"
    STORAGE = "storage"
    DATA = "data"
    """What is read for training, and the processes that read it."""
    CODE = "code"
    NUMERICS = "numerics"
    """The loss or the gradients are not finite, or far too large."""
    NODE = "node"
    """The machine, where nothing more exact is known."""
    PREEMPTION = "preemption"
    """Somebody, or a scheduler, ended it on purpose."""
    HANG = "hang"
    """Somebody waits for somebody who does not come; why is not known."""
    UNKNOWN = "unknown"


class TimeSource(StrEnum):
    """Where the time of a line is from."""

    LINE = "line"
    """From the line itself, with its year and zone, or from the kernel's time since boot."""
    ARRIVAL = "arrival"
    """From when it was read: the line says none, or none that can be trusted."""


class Origin(Struct, frozen=True):
    """Where a line comes from, as far as it is known without reading the line. Nothing of it is guessed."""

    source: Annotated[str, Meta(min_length=1, max_length=64)]
    """``training``, ``launcher``, ``kernel``, ``slurm``, ``fabric-manager``, or one of the policy's own."""
    node: _Name = ""
    """Empty where a file was brought from somewhere, and nobody says from where."""
    job: _Name | None = None
    attempt: _Number | None = None
    """Of the job, counted from 1."""
    rank: _Number | None = None
    local_rank: _Number | None = None
    node_rank: _Number | None = None
    pod: _Name | None = None
    """``namespace/name`` of the container's pod, by which the server finds the job."""
    stream: Annotated[str, Meta(max_length=LONGEST_STREAM)] = ""
    """The file, or what takes its place; a node's path, for people."""
    generation: str = ""
    """What tells the stream apart from others that had or will have its name, such as a file's inode and first bytes.
    `Finding.id` is made of it, and nobody else looks at it."""


class Finding(Struct, frozen=True, rename={"time_source": "time", "is_over": "over"}):
    """What one rule has found about one target in one stream, from its first line on."""

    id: Id
    """Names the stream and the place in it of the first line, so that a line which is read again makes the same id."""
    rule: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
    role: Role
    cause: CauseClass
    target: Target
    """A GPU or a node is named by where the line came from, or by the kernel; never by what a training printed."""
    origin: Origin
    """Of the first line; its rank is one of `ranks`."""
    first_at: datetime
    last_at: datetime
    """Of the first and the last line, aware UTC, by the clock of the node."""
    line: Annotated[str, Meta(max_length=LONGEST_LINE)]
    """The first line, of a block its most telling one: masked, at most 500 characters."""
    labels: Annotated[Texts, Meta(max_length=MOST_LABELS)] = field(default_factory=dict)
    """What the rule adds to the alert's labels, and so to its identity."""
    fields: Annotated[Texts, Meta(max_length=MOST_FIELDS)] = field(default_factory=dict)
    """What the pattern took from the first line."""
    ranks: frozenset[int] = frozenset()
    """Whose lines they were, as far as it is known."""
    count: Annotated[int, Meta(ge=1, le=LARGEST_NUMBER)] = 1
    """Lines so far."""
    time_source: TimeSource = TimeSource.ARRIVAL
    clock_error: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds by which the node's clock may differ from that of Redis."""
    is_over: bool = False
    """The rule's end was read: what it found is no more."""
    shape: _Short = ""
    """A hash of the first line without numbers, addresses and paths; the same line of another attempt has the same."""


MOST_AROUND = 50
"""Lines of an excerpt before a finding's first line, and after it."""
LARGEST_EXCERPT = 256 * 1024
"""Bytes of an excerpt, in UTF-8."""


class Excerpt(Struct, frozen=True):
    """The lines around the first line of a finding, in the order of their stream, masked."""

    lines: Annotated[tuple[str, ...], Meta(min_length=1, max_length=2 * MOST_AROUND + 1)]
    """As they were read, with their prefixes, each without its line feed."""
    at: Annotated[int, Meta(ge=0)]
    """Which of `lines` the finding begins with, counted from 0."""
    number: Annotated[int, Meta(ge=0, le=LARGEST_NUMBER)] = 0
    """Which line of the stream the first of `lines` is, counted from 1; 0 where nobody counts."""

    def within(self, most_bytes: int = LARGEST_EXCERPT) -> Excerpt:
        """The same of at most so many bytes: the lines that are farthest from the finding's are left out."""
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
        if total > most_bytes:  # the finding's line is all that is left
            kept = (kept[0].encode(errors="replace")[:most_bytes].decode(errors="ignore"),)
        return Excerpt(kept, self.at - first, number)
