"""What a handler needs where several ranks carry out one command: to agree on a value, and to hear from all ranks.

`JobCommand.group` is a `Group`, and so is what `trainmedic.Medic.group` returns for use outside of a command. Every
rank makes the same calls in the same order. Not here: how the ranks agree (``trainmedic.ranks.rounds``).
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Protocol, TypeVar

Value = TypeVar("Value")

PATIENCE = 1800.0
"""Seconds for ranks that live and have not come yet: a checkpoint of a large model takes minutes."""


class Group(Protocol):
    """The ranks that do the same thing together."""

    rank: int
    world_size: int

    def choose(self, make: Callable[[], Value], patience: float = PATIENCE) -> Value:
        """What `make` returns on rank 0, on every rank. It is called on rank 0 only; the value goes as JSON.

        Where it raises `Rejected` or `Unsupported`, every rank raises that. Raises NotAgreed where rank
        0 fails otherwise, or is gone.
        """
        ...

    def poll(self, value: Any = None, patience: float = PATIENCE) -> Mapping[int, Any]:
        """The `value` of each rank, the same mapping on every rank. Returns once all have come.

        A rank that is gone, has left the command or does not come in `patience` seconds is missing.
        Raises NotAgreed where that cannot be found out.
        """
        ...


class Alone:
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
