"""Keeping the global batch when a training goes on with another number of ranks.

The global batch is what makes one optimizer step: the samples of a micro-batch, times the micro-batches that are
accumulated, times the ranks. Learning rates and schedules are chosen for it. Where the number of ranks has changed the
accumulation makes up for it, if it can. Pure functions; who calls them: ``restore``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping


class GlobalBatchLost(ValueError):
    """The global batch cannot be kept; the text is the reason."""


@dataclass(frozen=True)
class GlobalBatch:
    """What makes one optimizer step of a training, without what commands have changed."""

    micro_batch: int | None
    """Samples of one batch on one rank; None where that is not known."""
    accumulation: int
    """Batches that make an optimizer step."""
    ranks: int
    given: int
    """The accumulation that the script has asked for; another one where the number of ranks had changed."""

    def plain(self) -> dict[str, int | None]:
        """As it is kept in a checkpoint."""
        numbers = {"accumulation": self.accumulation, "ranks": self.ranks, "given": self.given}
        return {"micro_batch": self.micro_batch, **numbers}

    @classmethod
    def of(cls, kept: Any) -> GlobalBatch | None:
        """As it was kept; None in a checkpoint of an earlier release."""
        if not isinstance(kept, Mapping):
            return None
        micro_batch = kept.get("micro_batch")
        named = (kept.get(name) for name in ("accumulation", "ranks", "given"))
        numbers = [number for number in named if isinstance(number, int) and number > 0]
        if len(numbers) < 3:
            return None
        return cls(micro_batch if isinstance(micro_batch, int) and micro_batch > 0 else None, *numbers)


def accumulation_to_go_on_with(then: GlobalBatch, now: GlobalBatch, accumulates: bool) -> int:
    """How many batches make an optimizer step from now on. Raises GlobalBatchLost.

    `accumulates` is whether the loop can accumulate as many as it is told.
    """
    if then.ranks == now.ranks:
        # What had been made of an earlier number of ranks holds on, unless the script asks for something else now.
        return then.accumulation if then.given == now.given and accumulates else now.accumulation
    micro_then, micro_now = (then.micro_batch, now.micro_batch) if then.micro_batch and now.micro_batch else (1, 1)
    size = micro_then * then.accumulation * then.ranks
    if micro_now * now.accumulation * now.ranks == size:
        return now.accumulation
    change = f"the checkpoint is of {then.ranks} ranks, and there are {now.ranks} now"
    if not accumulates:
        raise GlobalBatchLost(
            f"{change}: the global batch cannot be kept, because the loop does not say that it accumulates gradients: "
            "attach(..., accumulation=...)"
        )
    accumulation, rest = divmod(size, micro_now * now.ranks)
    if rest or not accumulation:
        of = "samples" if then.micro_batch and now.micro_batch else "batches"
        raise GlobalBatchLost(
            f"{change}: a global batch of {size} {of} is no multiple of {micro_now * now.ranks}, so no accumulation "
            "keeps it; take another number of ranks or another micro-batch"
        )
    return accumulation
