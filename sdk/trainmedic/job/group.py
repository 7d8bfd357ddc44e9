"""Agreement of the ranks on one command.

Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Protocol, TypeVar

Value = TypeVar("Value")

PATIENCE = 1800.0  # Seconds; large checkpoints take minutes


class Group(Protocol):
    rank: int
    world_size: int

    def choose(self, make: Callable[[], Value], patience: float = PATIENCE) -> Value:
        """Call `make` on rank 0; return its value (as JSON) on every rank.

        Every rank raises rank 0's `Rejected` or `Unsupported`, the others NotAgreed if it fails otherwise or is gone.
        """
        ...

    def poll(self, value: Any = None, patience: float = PATIENCE) -> Mapping[int, Any]:
        """Return each rank's `value`, the same on every rank.

        Missing are ranks that are gone, have left the command, or exceed `patience` seconds. Raises NotAgreed if the
        ranks cannot agree on these.
        """
        ...


class Ranks(Protocol):
    """A job's ranks as seen by one of them, such as `Medic`."""

    job: str
    rank: int
    world_size: int

    def group(self, name: str) -> Group:
        """Every rank passes the same name."""
        ...


class SingleRankGroup:
    rank = 0
    world_size = 1

    def choose(self, make: Callable[[], Value], patience: float = PATIENCE) -> Value:
        return make()

    def poll(self, value: Any = None, patience: float = PATIENCE) -> Mapping[int, Any]:
        return {0: value}


def ranks_named(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:6]) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
