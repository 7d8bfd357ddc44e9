"""Accumulation that keeps the global batch (micro-batch × accumulation × ranks) when the number of ranks changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping


class GlobalBatchLost(ValueError):
    """The global batch cannot be kept."""


@dataclass(frozen=True)
class GlobalBatch:
    """Components of an optimizer step by the script, without changes by commands."""

    micro_batch: int | None  # samples per batch and rank; None if unknown
    accumulation: int
    ranks: int
    given: int  # the script's own accumulation

    def plain(self) -> dict[str, int | None]:
        numbers = {"accumulation": self.accumulation, "ranks": self.ranks, "given": self.given}
        return {"micro_batch": self.micro_batch, **numbers}

    @classmethod
    def from_plain(cls, saved: Any) -> GlobalBatch | None:
        """Parse `plain`'s output; None if it is missing or invalid."""
        if not isinstance(saved, Mapping):
            return None
        micro_batch = saved.get("micro_batch")
        named = (saved.get(name) for name in ("accumulation", "ranks", "given"))
        numbers = [number for number in named if isinstance(number, int) and number > 0]
        if len(numbers) < 3:
            return None
        return cls(micro_batch if isinstance(micro_batch, int) and micro_batch > 0 else None, *numbers)


def accumulation_to_continue_with(then: GlobalBatch, now: GlobalBatch, accumulates: bool) -> int:
    """Return the accumulation after a resume. Raises GlobalBatchLost.

    ``accumulates``: the loop supports any.
    """
    # If a micro-batch is unknown, count batches instead of samples.
    micro_then, micro_now = (then.micro_batch, now.micro_batch) if then.micro_batch and now.micro_batch else (1, 1)
    change = f"the checkpoint is of {then.ranks} ranks, and there are {now.ranks} now"
    if then.ranks == now.ranks:
        # An earlier adjustment stays valid unless the script's accumulation changed.
        if not accumulates or then.given != now.given or then.accumulation == then.given:
            return now.accumulation
        if micro_then == micro_now:
            return then.accumulation
        change = f"the checkpoint is of micro-batches of {micro_then}, and they are of {micro_now} now"
    size = micro_then * then.accumulation * then.ranks
    if micro_now * now.accumulation * now.ranks == size:
        return now.accumulation
    if not accumulates:
        raise GlobalBatchLost(
            f"{change}: the global batch cannot be kept, because the loop does not declare gradient accumulation: "
            "use attach(..., accumulation=...)"
        )
    accumulation, remainder = divmod(size, micro_now * now.ranks)
    if remainder or not accumulation:
        unit = "samples" if then.micro_batch and now.micro_batch else "batches"
        raise GlobalBatchLost(
            f"{change}: a global batch of {size} {unit} is not a multiple of {micro_now * now.ranks}, so no "
            "accumulation keeps it; use another number of ranks or another micro-batch"
        )
    return accumulation
