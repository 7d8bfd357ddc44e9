"""The batch source of a loop that draws its batches by a function, such as nanoGPT's ``get_batch``.

Each batch is drawn with the random generators of the CPU seeded by its number, and the training's own put back
afterwards: so batch number n is the same whenever it is drawn, whatever was drawn before it. That holds where the
function depends on nothing but those generators. The first batch is drawn twice to find out; of a function that gives
two different ones neither is lost, and it counts as a stream. Not here: other sources (``batch_sources``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import torch

from trainmedic.torch import randomness
from trainmedic.torch.sources.batch_sources import NOT_REPLAYED, BatchSource, ForwardSource

log = logging.getLogger("trainmedic")


class DrawnSource(ForwardSource):
    """Batches that a function returns, one for each call; ``rank`` makes those of the ranks differ.

    They are one epoch, or as many as there are times that the function raises StopIteration.
    """

    kind = "Drawn"

    def __init__(self, draw: Callable[[], Any], seed: int, rank: int) -> None:
        super().__init__()
        self._draw = draw
        self._seed = seed
        self._rank = rank
        self._repeats: bool | None = None  # not known before the first batch
        self._drawn: list[Any] = []  # the second batch of a function that does not repeat itself

    def fetch(self) -> Any:
        batch = self._drawn.pop() if self._drawn else self._draw_seeded()
        if self._repeats is None:
            again = self._draw_seeded()
            self._repeats = _is_same(batch, again)
            if not self._repeats:
                self._drawn.append(again)
                log.warning(
                    "loader: the function that draws batches keeps a position of its own, so that a rollback does not "
                    "repeat them; to be repeatable it draws from the generators of Python, NumPy and PyTorch alone"
                )
        self.position += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {**super().state(), "seed": self._seed, "repeats": self._repeats}

    def restore(self, state: dict[str, Any]) -> str:
        if self._repeats is False:
            return super().restore(state)
        if state.get("repeats") is False:
            self.epoch, self.position = state["epoch"], state["place"]
            return f"{NOT_REPLAYED}: the function that draws them keeps a position of its own; it goes on"
        self._seed = int(state["seed"])
        self._passed = 0
        return BatchSource.restore(self, state)

    def _draw_seeded(self) -> Any:
        with randomness.preserved():
            randomness.seed(randomness.mixed_seed(self._seed, self._rank, self.epoch, self.position))
            return self._draw()


def _is_same(batch: Any, other: Any) -> bool:
    """Whether two batches hold the same; False also where that cannot be told."""
    if type(batch) is not type(other):
        return False
    if isinstance(batch, torch.Tensor):
        return batch.shape == other.shape and torch.allclose(batch, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(batch, Mapping):
        return batch.keys() == other.keys() and all(_is_same(batch[name], other[name]) for name in batch)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return len(batch) == len(other) and all(map(_is_same, batch, other))
    if hasattr(batch, "__array__"):
        return _is_same(torch.as_tensor(batch), torch.as_tensor(other))
    return bool(batch == other)
