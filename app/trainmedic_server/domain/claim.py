"""The part of a target that an open run locks."""

from __future__ import annotations

from msgspec import Struct

from trainmedic_core.target import Target, TargetKind


class Claim(Struct, frozen=True):
    target: Target
    disks_only: bool = False
    nothing: bool = False
    """A run without changes neither blocks nor waits."""

    @classmethod
    def of_disks(cls, node: str) -> Claim:
        return cls(Target(TargetKind.NODE, node=node), disks_only=True)

    def overlaps(self, other: Claim) -> bool:
        """Return whether runs with these claims could change the same thing.

        The cluster covers everything, a node its disks and GPUs, which do not overlap.
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
