"""What a handler needs if several ranks carry out one command: to agree on a value, and to collect one of each rank.

`JobCommand.group` is a `Group`, and so is what `trainmedic.Medic.group` returns for use outside of a command. Every
rank makes the same calls in the same order. Not here: how the ranks agree (``trainmedic.ranks.rounds``).
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Protocol, TypeVar

Value = TypeVar("Value")

PATIENCE = 1800.0
"""Seconds to wait for ranks that live but are late, because a checkpoint of a large model takes minutes."""


class Group(Protocol):
    """The ranks that do the same thing together."""

    rank: int
    world_size: int

    def choose(self, make: Callable[[], Value], patience: float = PATIENCE) -> Value:
        """Call `make` on rank 0 only, and return its value on every rank. The value is sent as JSON.

        If it raises `Rejected` or `Unsupported`, every rank raises that. Raises NotAgreed if rank 0 fails
        otherwise, or is gone.
        """
        ...

    def poll(self, value: Any = None, patience: float = PATIENCE) -> Mapping[int, Any]:
        """Return the `value` of each rank, the same mapping on every rank, once all ranks have called this.

        A rank is missing from it if it is gone, has left the command, or does not call in `patience` seconds.
        Raises NotAgreed if the ranks cannot agree which these are.
        """
        ...


class SingleRankGroup:
    """The group of a single rank."""

    rank = 0
    world_size = 1

    def choose(self, make: Callable[[], Value], patience: float = PATIENCE) -> Value:
        return make()

    def poll(self, value: Any = None, patience: float = PATIENCE) -> Mapping[int, Any]:
        return {0: value}


def ranks_named(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 0, 1, 2 and 60 more``."""
    shown = ", ".join(str(rank) for rank in ranks[:6]) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
