"""Facts about one attempt, the input of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from msgspec import Struct, field

from trainmedic_logs.diagnosis.collectives import CollectiveLines
from trainmedic_logs.diagnosis.exits import LAUNCHER, Exit
from trainmedic_logs.diagnosis.flight_recorder.missing_ranks import Reading
from trainmedic_logs.diagnosis.own_times import LossRise
from trainmedic_logs.diagnosis.slow import RankStep, ThroughputDrop
from trainmedic_logs.diagnosis.verdict import Evidence
from trainmedic_logs.domain.finding import RANK_LIMIT, Finding
from trainmedic_logs.domain.pod_fault import PodReading


class RankFacts(Struct, frozen=True):
    node: str = ""
    """Empty if unknown."""
    gpu: str | None = None
    pid: int | None = None
    last_step: int | None = None
    last_step_at: datetime | None = None
    last_line_at: datetime | None = None
    """None if no line was read."""
    was_read: bool = False
    """A log of its own was read, even if empty."""
    is_node_sure: bool = True
    """Others than the job state it."""


class Earlier(Struct, frozen=True):
    """Verdict on an earlier attempt."""

    attempt: int
    fingerprint: str


class Facts(Struct, frozen=True):
    job: str | None = None
    attempt: int | None = None
    findings: Sequence[Finding] = ()
    """In order per stream."""
    exits: Sequence[Exit] = ()
    recorder: Reading | None = None
    """None without flight recorder dumps."""
    refused_dumps: Mapping[str, str] = field(default_factory=dict)
    """Reasons by dump."""
    ranks: Mapping[int, RankFacts] = field(default_factory=dict)
    world_size: int | None = None
    last_step_at: datetime | None = None
    steps: Mapping[int, RankStep] = field(default_factory=dict)  # step times by rank, if reported
    loss_rise: LossRise | None = None
    throughput_drop: ThroughputDrop | None = None
    began_at: datetime | None = None
    """Earlier trusted findings are unrelated. None if unknown, or the log begins with a fault."""
    outlived: frozenset[str] = frozenset()
    """IDs of findings after which the training continued."""
    followed: Mapping[str, int] = field(default_factory=dict)
    """Number of ordinary lines or finite losses afterwards, by finding ID."""
    excused: frozenset[str] = frozenset()
    """IDs of faults that the program announced to skip."""
    knows_what_was_read: bool = True
    """False if a rank without findings looks silent."""
    logs_without_rank: tuple[str, ...] = ()
    """Logs whose lines state no rank."""
    kernel_read: frozenset[str] | None = frozenset()
    """Nodes whose kernel log was read. None if unknown."""
    gone_nodes: Mapping[str, datetime] = field(default_factory=dict)
    """Nodes whose agent is silent, and since when."""
    healthy_shapes: frozenset[str] = frozenset()
    """Shapes that successful attempts print too."""
    earlier: Sequence[Earlier] = ()
    collectives: CollectiveLines = field(default_factory=CollectiveLines)
    used_nccl: bool = True
    """Without NCCL, no dumps are expected."""
    reported: Evidence | None = None
    """Failure reported by the launcher or the job."""
    is_reported_hang: bool = False
    """The launcher ended it because it hung, so exit codes mean nothing."""
    pods: PodReading = field(default_factory=PodReading)
    is_known_to_fail: bool = False
    """The launcher, the job or the server states that it failed."""

    def node_of(self, rank: int | None) -> str:
        known = self.ranks.get(rank) if rank is not None else None
        return known.node if known else ""

    def ranks_on(self, node: str) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, known in self.ranks.items() if node and known.node == node))

    @property
    def has_ended_well(self) -> bool:
        """The launcher reported no failure; without its report, or after a hang, every known rank exited with 0."""
        by_launcher = [each for each in self.exits if each.reporter == LAUNCHER]
        if by_launcher and not self.is_reported_hang:
            return not any(each.is_failure for each in by_launcher)
        ended = {each.rank for each in self.exits if each.code == 0 and each.rank is not None}
        return bool(ended) and self.ranks.keys() <= ended and not any(each.is_failure for each in self.exits)

    @property
    def unread_ranks(self) -> tuple[int, ...]:
        """Silent ranks. If unknown what was read, without those that torchrun saw end."""
        if self.knows_what_was_read:
            return self.silent_ranks
        ended = {each.rank for each in self.exits if each.reporter == "torchrun"}
        return tuple(rank for rank in self.silent_ranks if rank not in ended)

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """Ranks without a read line, ascending."""
        known = self.recorder.silent if self.recorder else ()
        # Jobs and dumps can state any number, and all ranks below it would count.
        stated = (rank for rank in (*self.ranks, *known) if rank < RANK_LIMIT)
        count = max([self.world_size or 0, *(rank + 1 for rank in stated)])
        lines = {rank for rank, state in self.ranks.items() if state.last_line_at is not None}
        return tuple(rank for rank in range(count) if rank not in lines)

    @property
    def progressed_at(self) -> datetime | None:
        own = [known.last_step_at for known in self.ranks.values() if known.last_step_at is not None]
        return max([*own, *([self.last_step_at] if self.last_step_at else [])], default=None)

    def is_sure_of(self, node: str) -> bool:
        """Return whether others than the job confirm that it ran on `node`."""
        of_ranks = any(known.node == node and known.is_node_sure for known in self.ranks.values())
        return bool(node) and (of_ranks or any(ended.node == node and ended.is_node_sure for ended in self.exits))

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(known.node for known in self.ranks.values() if known.node)


class Sign(NamedTuple):
    """Sign that a job fails or hangs."""

    at: datetime
    """Receipt by the server; for pods, Kubernetes' time."""
    attempt: int | None = None
    is_wait: bool = False
    """True if later steps disprove it."""
