"""What is known of one attempt of a job, from whichever side: what a diagnosis is made from."""

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
from trainmedic_logs.domain.finding import Finding
from trainmedic_logs.domain.pod_fault import PodReading


class RankFacts(Struct, frozen=True):
    """What is known of one rank, whether it failed or not."""

    node: str = ""
    """Empty where it is not known."""
    gpu: str | None = None
    """Its GPU, as the node's kernel names it: a PCI address."""
    pid: int | None = None
    last_step: int | None = None
    """The last step that it said to have completed."""
    last_step_at: datetime | None = None
    last_line_at: datetime | None = None
    """Of whatever it printed last; None where it printed nothing that was read."""
    was_read: bool = False
    """A log of its own was read, whatever is in it."""
    is_node_sure: bool = True
    """Somebody else than the job says on which node it ran: the place of its log, its agent, or the launcher. What a
    job prints, or writes beside its log, can name any node."""


class Earlier(Struct, frozen=True):
    """The verdict on an earlier attempt of the same job."""

    attempt: int
    fingerprint: str


class Facts(Struct, frozen=True):
    """Everything that was collected of one attempt."""

    job: str | None = None
    attempt: int | None = None
    findings: Sequence[Finding] = ()
    """Of all ranks and nodes of the job; those of one stream in its order."""
    exits: Sequence[Exit] = ()
    recorder: Reading | None = None
    """What the flight recorder's dumps say together; None where there is none."""
    refused_dumps: Mapping[str, str] = field(default_factory=dict)
    """Which dumps were not read, and why."""
    ranks: Mapping[int, RankFacts] = field(default_factory=dict)
    world_size: int | None = None
    last_step_at: datetime | None = None
    """When any rank last completed a step."""
    steps: Mapping[int, RankStep] = field(default_factory=dict)
    """How each rank's steps divided at last, where it tells."""
    loss_rise: LossRise | None = None
    """Loss that was much lower before, by the log."""
    throughput_drop: ThroughputDrop | None = None
    """Drop of the throughput far below the usual one, by the log."""
    began_at: datetime | None = None
    """When the first line of the job with a time was printed; None where none is known, or trouble is all that is."""
    outlived: frozenset[str] = frozenset()
    """The ids of findings after which the training certainly went on."""
    followed: Mapping[str, int] = field(default_factory=dict)
    excused: frozenset[str] = frozenset()
    """The ids of exceptions before which the program stated that it goes on."""
    """How many ordinary lines the same rank, or stream, printed after a finding, by its id."""
    knows_what_was_read: bool = True
    """Whether it is known of which ranks lines were read."""
    nobodys: tuple[str, ...] = ()
    """The job's logs that were read in which lines do not say of which rank they are."""
    kernel_read: frozenset[str] | None = frozenset()
    """The nodes whose kernel log was read over that time; None where nobody knows."""
    gone_nodes: Mapping[str, datetime] = field(default_factory=dict)
    """Nodes that are not there any more, and since when, as the server sees it: never what a job says."""
    healthy_shapes: frozenset[str] = frozenset()
    """The shapes of lines that successful attempts of this job printed too: `Finding.shape`."""
    earlier: Sequence[Earlier] = ()
    collectives: CollectiveLines = field(default_factory=CollectiveLines)
    """Collectives in which ranks timed out, by their watchdogs."""
    used_nccl: bool = True
    """True if any line is about NCCL. Without NCCL there are no dumps of its flight recorder."""
    reported: Evidence | None = None
    """Report by the launcher, or by the job itself, that it failed."""
    is_reported_hang: bool = False
    """True if the launcher ended it because it hung. Then the exit codes of its processes mean nothing."""
    pods: PodReading = field(default_factory=PodReading)
    """Kubernetes' statements about the job's pods."""
    is_known_to_fail: bool = False
    """Whether who watches the job says that it failed; of a folder nobody does."""

    def node_of(self, rank: int | None) -> str:
        """The node on which `rank` ran; empty where it is not known."""
        known = self.ranks.get(rank) if rank is not None else None
        return known.node if known else ""

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """The ranks that ran on `node`, ascending."""
        return tuple(sorted(rank for rank, known in self.ranks.items() if node and known.node == node))

    @property
    def has_ended_well(self) -> bool:
        """True if the launcher saw exit code 0, or if each rank that was read states that it finished and no process
        failed."""
        by_launcher = [each for each in self.exits if each.teller == LAUNCHER]
        if by_launcher and not self.is_reported_hang:
            return not any(each.is_failure for each in by_launcher)
        ended = {each.rank for each in self.exits if each.code == 0 and each.rank is not None}
        return bool(ended) and self.ranks.keys() <= ended and not any(each.is_failure for each in self.exits)

    @property
    def unread_ranks(self) -> tuple[int, ...]:
        """Ranks whose output may be decisive and was not read. If it is unknown what was read, a rank counts as read
        when a launcher on its node reported its end, because all output passes through the launcher."""
        if self.knows_what_was_read:
            return self.silent_ranks
        ended = {each.rank for each in self.exits if each.teller == "torchrun"}
        return tuple(rank for rank in self.silent_ranks if rank not in ended)

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """The ranks of which no line is known, as far as it is known how many there are; ascending."""
        known = self.recorder.silent if self.recorder else ()
        count = max([self.world_size or 0, *(rank + 1 for rank in (*self.ranks, *known))], default=0)
        lines = {rank for rank, state in self.ranks.items() if state.last_line_at is not None}
        return tuple(rank for rank in range(count) if rank not in lines)

    @property
    def progressed_at(self) -> datetime | None:
        """When a step was completed last, by any rank; None where no step is known."""
        own = [known.last_step_at for known in self.ranks.values() if known.last_step_at is not None]
        return max([*own, *([self.last_step_at] if self.last_step_at else [])], default=None)

    def is_sure_of(self, node: str) -> bool:
        """Whether it is known, otherwise than by the job's own word, that something of the job ran on `node`."""
        of_ranks = any(known.node == node and known.is_node_sure for known in self.ranks.values())
        return bool(node) and (of_ranks or any(ended.node == node and ended.is_node_sure for ended in self.exits))

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes on which ranks ran."""
        return frozenset(known.node for known in self.ranks.values() if known.node)


class Sign(NamedTuple):
    """What says that a job fails or hangs."""

    at: datetime
    """When the server heard it."""
    attempt: int | None = None
    """Of which attempt it is; None where nobody says."""
    is_wait: bool = False
    """True if a job can survive the stated fault, such as a collective that timed out or an actor that died. Steps that
    follow show that nothing failed."""
