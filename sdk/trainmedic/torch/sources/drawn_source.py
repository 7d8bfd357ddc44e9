"""Batch source for a function that draws batches, such as nanoGPT's ``get_batch``.

CPU generators are seeded by the batch's number. The first batch is drawn twice; a function that returns
different ones counts as a stream.
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
    """Batches of a function, one per call. ``rank`` gives each rank other random numbers."""

    kind = "Drawn"

    def __init__(self, draw: Callable[[], Any], seed: int, rank: int) -> None:
        super().__init__()
        self._draw = draw
        self._seed = seed
        self._rank = rank
        self._repeats: bool | None = None  # unknown before the first batch
        self._pending: list[Any] = []  # second batch of a function that does not repeat, not yet delivered

    @property
    def goes_back(self) -> bool:  # type: ignore[override]
        return self._repeats is True

    def fetch(self) -> Any:
        batch = self._pending.pop() if self._pending else self._draw_seeded()
        if self._repeats is None:
            again = self._draw_seeded()
            self._repeats = _is_same(batch, again)
            if not self._repeats:
                self._pending.append(again)
                log.warning(
                    "loader: the function that draws batches keeps its own position, so rollbacks do not repeat them; "
                    "let it depend on the random generators of Python, NumPy and PyTorch only"
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
            return f"{NOT_REPLAYED}: the function that draws them keeps its own position and continues"
        self._seed = int(state["seed"])
        self._lost = 0
        return BatchSource.restore(self, state)

    def _draw_seeded(self) -> Any:
        with randomness.preserved():
            randomness.seed(randomness.mixed_seed(self._seed, self._rank, self.epoch, self.position))
            return self._draw()


def _is_same(batch: Any, other: Any) -> bool:
    try:
        return _is_equal(batch, other)
    except Exception:  # such as a user's class around tensors, whose comparison is no truth value
        return False


def _is_equal(batch: Any, other: Any) -> bool:
    if type(batch) is not type(other):
        return False
    if isinstance(batch, torch.Tensor):
        return batch.shape == other.shape and torch.allclose(batch, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(batch, Mapping):
        return batch.keys() == other.keys() and all(_is_equal(batch[name], other[name]) for name in batch)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return len(batch) == len(other) and all(map(_is_equal, batch, other))
    if hasattr(batch, "__array__"):
        return _is_array_equal(batch, other)
    return bool(batch == other)


def _is_array_equal(batch: Any, other: Any) -> bool:
    try:
        tensors = torch.as_tensor(batch), torch.as_tensor(other)
    except (TypeError, ValueError, RuntimeError):  # such as NumPy's texts
        return _is_equal(batch.__array__().tolist(), other.__array__().tolist())
    return _is_equal(*tensors)
