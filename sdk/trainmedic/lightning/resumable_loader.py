"""A data loader that can be gone back in: what Lightning calls a resumable one.

Lightning goes on from a checkpoint in the middle of an epoch, but a plain `DataLoader` begins at its first batch
again, in another order. `ResumableLoader` stands before the loader and tells Lightning where it is, so that the
checkpoint holds it: the place in the epoch, and the random state with which the epoch's order was drawn. Who makes it:
``trainmedic.lightning.fit``, for jobs of one rank; with several, Lightning puts the loader together anew.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from trainmedic.torch import randomness


class ResumableLoader:
    """``loader`` has a length. Everything but the iteration is its own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._place = 0
        self._began: Mapping[str, Any] | None = None
        self._resume: Mapping[str, Any] | None = None
        self.to_leave_out = 0
        """So many batches are left out from now on; in an epoch that ends before, the rest in the next."""
        self.left_out = 0
        """So many were left out since this was last set to 0."""
        self._untold = 0
        self.limit: float = float("inf")
        """Batches of an epoch, at most; Lightning's ``limit_train_batches``."""
        self.group = 1
        """Batches that make one step; left out are whole groups."""

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Called by Lightning for a checkpoint."""
        return {"place": self._place, "began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Called by Lightning; the next iteration goes on from there."""
        self._resume = state

    def __iter__(self) -> Iterator[Any]:
        iterator = self._begin()
        while True:
            self._leave_out(iterator)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._place += 1
            yield batch

    def take_left_out(self) -> int:
        """So many were left out since the last call, before the batch that was delivered last."""
        untold, self._untold = self._untold, 0
        return untold

    def _begin(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        self._place = 0
        if resume is None or resume["began"] is None or resume["place"] >= len(self):
            self._began = randomness.capture()
            return iter(self._loader)
        now, self._began = randomness.capture(), resume["began"]
        randomness.restore(self._began)
        iterator: Iterator[Any] = iter(self._loader)
        for _ in range(resume["place"]):
            next(iterator)
            self._place += 1
        randomness.restore(now)
        return iterator

    def _leave_out(self, iterator: Iterator[Any]) -> None:
        """Never a whole rest of an epoch: Lightning has to see its end."""
        if not self.to_leave_out or self._place % self.group:
            return
        left = int(min(len(self), self.limit)) - self._place
        groups = max(min(-(-self.to_leave_out // self.group), (left - 1) // self.group), 0)
        for _ in range(groups * self.group):
            next(iterator)
            self._place += 1
        self.left_out += groups * self.group
        self._untold += groups * self.group
        self.to_leave_out = max(self.to_leave_out - groups * self.group, 0)
