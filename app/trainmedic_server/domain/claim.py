"""The part of its targets that an open run locks."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core import gpu_names
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.topology import AgentTopology


class Claim(Struct, frozen=True):
    target: Target
    disks_only: bool = False  # of the node; its GPUs stay free
    leaves_disks: bool = False  # of the node, which is locked otherwise
    nothing: bool = False  # `target` is not locked: a run that does not change it neither blocks nor waits for it
    also: tuple[Target, ...] = ()  # further targets, each locked as a whole
    cards: Mapping[Target, frozenset[str]] = field(default_factory=dict)  # UUIDs of GPUs, as agents have reported them

    @classmethod
    def of_disks(cls, node: str) -> Claim:
        return cls(Target(TargetKind.NODE, node=node), disks_only=True)

    def seen_by(self, agents: AgentTopology) -> Claim:
        """Add its GPUs' present UUIDs."""
        cards = dict(self.cards)  # earlier ones stay: the index may have meant either GPU when the run acted
        for target in (self.target, *self.also):
            if target.kind is TargetKind.GPU:
                gpu = agents.gpus_by_key.get(gpu_names.key(target.gpu or "", target.node))
                if gpu is not None and gpu.node == target.node:
                    cards[target] = cards.get(target, frozenset()) | {gpu_names.key(gpu.uuid)}
        return self if cards == self.cards else replace(self, cards=cards)

    def overlaps(self, other: Claim, *, if_unknown: bool = True) -> bool:
        """Return whether runs with these claims could change the same thing.

        `if_unknown`: the answer for two names that may be of one GPU.
        """
        # A node includes its GPUs, and its disks unless it leaves them. Disks and GPUs do not overlap.
        if not (self.also or other.also):
            return self._overlaps(other, if_unknown)
        return any(own._overlaps(others, if_unknown) for own in self.parts for others in other.parts)

    @property
    def parts(self) -> tuple[Claim, ...]:
        if not self.also:
            return (self,)
        return (replace(self, also=()), *(Claim(target, cards=self.cards) for target in self.also))

    def _overlaps(self, other: Claim, if_unknown: bool) -> bool:
        if self.nothing or other.nothing:
            return False
        if self.disks_only != other.disks_only:
            not_of_disks = other if self.disks_only else self
            if not_of_disks.leaves_disks or not_of_disks.target.kind is TargetKind.GPU:
                return False
        if self.target.may_be(other.target):
            own, others = self.cards.get(self.target), other.cards.get(other.target)
            return not own.isdisjoint(others) if own and others else if_unknown
        return self.target.overlaps(other.target)

    def __str__(self) -> str:
        if self.also:
            return ", ".join(map(str, self.parts))
        if self.nothing:
            return f"nothing of {self.target.key}"
        return f"the disks of {self.target.key}" if self.disks_only else self.target.key
