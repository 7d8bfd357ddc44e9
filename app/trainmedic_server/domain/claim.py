"""The part of a target that one open run locks: all of it, the disks of a node, or nothing. Pure.

``engine.claims`` makes claims, ``engine.locks`` grants them.
"""

from __future__ import annotations

from msgspec import Struct

from trainmedic_core.target import Target, TargetKind


class Claim(Struct, frozen=True):
    """Target, or part of one, on which one run at a time may work."""

    target: Target
    disks_only: bool = False
    """True for a claim on the disks of the target's node and on nothing else there."""
    nothing: bool = False
    """True for a run that changes nothing: it waits for no other run, and no other run waits for it."""

    @classmethod
    def of_disks(cls, node: str) -> Claim:
        """Return the claim on the disks of a node."""
        return cls(Target(TargetKind.NODE, node=node), disks_only=True)

    def overlaps(self, other: Claim) -> bool:
        """Return whether two runs with these claims could change the same thing.

        The disks of a node are a part of it, as its GPUs are: the node covers both, and neither covers the other.
        """
        if self.nothing or other.nothing:
            return False
        if self.disks_only != other.disks_only:
            whole = other if self.disks_only else self
            if whole.target.kind is TargetKind.GPU:
                return False
        return self.target.overlaps(other.target)

    def __str__(self) -> str:
        if self.nothing:
            return f"nothing of {self.target.key}"
        return f"the disks of {self.target.key}" if self.disks_only else self.target.key
