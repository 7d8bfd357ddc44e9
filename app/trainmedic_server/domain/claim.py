"""The part of its targets that an open run locks."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind


class Claim(Struct, frozen=True):
    target: Target
    disks_only: bool = False  # of the node; its GPUs stay free
    nothing: bool = False  # `target` is not locked: a run that does not change it neither blocks nor waits for it
    also: tuple[Target, ...] = ()  # further targets, each locked as a whole

    @classmethod
    def of_disks(cls, node: str) -> Claim:
        return cls(Target(TargetKind.NODE, node=node), disks_only=True)

    def overlaps(self, other: Claim) -> bool:
        """Return whether runs with these claims could change the same thing.

        A node includes its disks and GPUs, which do not overlap.
        """
        if not (self.also or other.also):
            return self._overlaps(other)
        return any(own._overlaps(others) for own in self.parts for others in other.parts)

    @property
    def parts(self) -> tuple[Claim, ...]:
        if not self.also:
            return (self,)
        return (replace(self, also=()), *map(Claim, self.also))

    def _overlaps(self, other: Claim) -> bool:
        if self.nothing or other.nothing:
            return False
        if self.disks_only != other.disks_only:
            not_of_disks = other if self.disks_only else self
            if not_of_disks.target.kind is TargetKind.GPU:
                return False
        return self.target.overlaps(other.target)

    def __str__(self) -> str:
        if self.also:
            return ", ".join(map(str, self.parts))
        if self.nothing:
            return f"nothing of {self.target.key}"
        return f"the disks of {self.target.key}" if self.disks_only else self.target.key
