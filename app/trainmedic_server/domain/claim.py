"""What a run has for itself while it is open: its target, or only the disks of the node that is its target. Pure.

Who calls it: ``engine.claims`` makes claims, ``engine.locks`` grants them.
"""

from __future__ import annotations

from msgspec import Struct

from trainmedic_server.domain.target import Target, TargetKind


class Claim(Struct, frozen=True):
    """A target, or a part of one, that one run at a time may work on."""

    target: Target
    disks_only: bool = False
    """Whether the claim is on the disks of the target's node and on nothing else there."""

    @classmethod
    def of_disks(cls, node: str) -> Claim:
        """Return the claim on the disks of a node."""
        return cls(Target(TargetKind.NODE, node=node), disks_only=True)

    def overlaps(self, other: Claim) -> bool:
        """Return whether two runs with these claims could change the same thing.

        The disks of a node are a part of it, as its GPUs are: the node covers both, and neither covers the other.
        """
        if self.disks_only != other.disks_only:
            whole = other if self.disks_only else self
            if whole.target.kind is TargetKind.GPU:
                return False
        return self.target.overlaps(other.target)

    def __str__(self) -> str:
        return f"the disks of {self.target.key}" if self.disks_only else self.target.key
