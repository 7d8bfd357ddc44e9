"""A data loader that finds its position again: what Lightning calls a resumable one.

Lightning goes on from a checkpoint in the middle of an epoch, but a plain `DataLoader` begins at its first batch
again, in another order. `ResumableLoader` wraps the loader and gives Lightning the state for the checkpoint: the
position in the epoch, and the random state with which the epoch's order was drawn. ``trainmedic.lightning.fit`` makes
one for jobs of one rank; with several, Lightning builds the loader again by itself.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from trainmedic.torch import randomness


class ResumableLoader:
    """Iterates over ``loader``, which has a length; everything but the iteration is the loader's own."""

    def __init__(self, loader: Any, group: int) -> None:
        self._loader = loader
        self._position = 0  # in batches of this epoch
        self._began: Mapping[str, Any] | None = None  # the random state at the beginning of this epoch
        self._resume: Mapping[str, Any] | None = None
        self.to_skip = 0
        """How many batches are left out from now on; where the epoch ends before, the rest in the next."""
        self.skipped = 0
        """How many batches were left out since this was last set to 0."""
        self._untaken = 0  # how many were left out since `take_skipped`
        self.limit: float = float("inf")
        """How many batches an epoch has at most: Lightning's ``limit_train_batches``."""
        self.group = group
        """How many batches make one step; only whole groups are left out."""

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Called by Lightning for a checkpoint, which holds it under these names."""
        return {"place": self._position, "began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Called by Lightning; the next iteration goes on from there."""
        self._resume = state

    def __iter__(self) -> Iterator[Any]:
        iterator = self._begin()
        while True:
            self._skip(iterator)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._position += 1
            yield batch

    def take_skipped(self) -> int:
        """How many were left out since the last call, before the batch that was delivered last."""
        batches, self._untaken = self._untaken, 0
        return batches

    def _begin(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        self._position = 0
        if resume is None or resume["began"] is None or resume["place"] >= len(self):
            self._began = randomness.capture()
            return iter(self._loader)
        # The loader draws the epoch's order when it is iterated over: with the random state of then, it is the same.
        now, self._began = randomness.capture(), resume["began"]
        randomness.restore(self._began)
        iterator: Iterator[Any] = iter(self._loader)
        for _ in range(resume["place"]):
            next(iterator)
            self._position += 1
        randomness.restore(now)
        return iterator

    def _skip(self, iterator: Iterator[Any]) -> None:
        """Leave out what is to be left out, and never the whole rest of an epoch: Lightning has to see its end."""
        if not self.to_skip or self._position % self.group:
            return
        left = int(min(len(self), self.limit)) - self._position
        groups = max(min(-(-self.to_skip // self.group), (left - 1) // self.group), 0)
        for _ in range(groups * self.group):
            next(iterator)
            self._position += 1
        self.skipped += groups * self.group
        self._untaken += groups * self.group
        self.to_skip = max(self.to_skip - groups * self.group, 0)
