"""The batch sources of loaders and data sets that keep their own position.

Not here: other sources (``batch_sources``), and which of them serves a loader (``source_choice``).
"""

from __future__ import annotations

from typing import Any, Iterator

import torch

from trainmedic.torch import randomness
from trainmedic.torch.sources.batch_sources import NOT_REPLAYED, REPLAYED, IteratedSource, read_again, set_epoch


class StatefulSource(IteratedSource):
    """Batches of a loader that keeps its own position, or one whose data set does (``keeper``).

    A loader may keep how far it was, and not the order: a sampler draws that when the epoch begins, as a data set may
    that shuffles. So each iterator begins with the random numbers that it had at first.
    """

    kind = "Stateful"

    def __init__(self, loader: Any, keeper: Any) -> None:
        super().__init__()
        self._loader = loader
        self._keeper = keeper
        # A data set that keeps its position may be at its end, between two epochs, and would stay there.
        self._fresh = keeper.state_dict() if keeper is not loader else None
        self._at_start: dict[str, Any] | None = None  # the random numbers with which the present iterator began
        # Whether the position that was restored lies behind the beginning of an iterator: a loader draws random numbers
        # when it begins to iterate, and the generators of that checkpoint have given these already.
        self._was_begun = False

    def state(self) -> dict[str, Any]:
        before = randomness.capture()
        kept = self._keeper.state_dict()
        # A loader may begin to iterate in order to say its state, which shows in the random numbers that it draws.
        if self._at_start is None and not torch.equal(before["torch"], torch.get_rng_state()):
            self._at_start = before
        return {**super().state(), "loader": kept, "begun": self._at_start is not None, "at_start": self._at_start}

    def restore(self, state: dict[str, Any]) -> str:
        super().restore(state)
        self.stop_loading()
        self._was_begun = state.get("begun", False)
        self._at_start = state.get("at_start")
        self._tell_epoch()
        fresh = self._fresh is not None and self.position == 0
        self._keeper.load_state_dict(self._fresh if fresh else state["loader"])
        return REPLAYED

    def fetch(self) -> Any:
        try:
            return super().fetch()
        except StopIteration:
            self._at_start = None
            raise

    def _tell_epoch(self) -> None:
        set_epoch(self._keeper, self.epoch)
        dataset = getattr(self._loader, "dataset", None)
        if hasattr(dataset, "next_epoch"):
            set_epoch(dataset, self.epoch)

    def _begin(self) -> Iterator[Any]:
        self._tell_epoch()
        if not self._was_begun:
            if self._at_start is None:
                self._at_start = randomness.capture()
            return iter(self._loader)
        self._was_begun = False
        with randomness.preserved():
            if self._at_start is not None:
                randomness.restore(self._at_start)
            return iter(self._loader)


class BufferedSource(StatefulSource):
    """Batches of a data set that keeps its position, but not what lies in its shuffle buffer, as Hugging Face's do.

    So the epoch is read again up to a position, if that is at most ``most`` batches; further on it goes on from about
    where it was.
    """

    def __init__(self, loader: Any, keeper: Any, most: int) -> None:
        super().__init__(loader, keeper)
        self._most = most

    def restore(self, state: dict[str, Any]) -> str:
        kept = super().restore(state)
        position = self.position
        if position == 0:
            return kept
        if position > self._most:
            return (
                f"{NOT_REPLAYED}: more than {self._most} would have to be read again; the data set goes on from where "
                "it was, and what it shuffles in a buffer comes otherwise"
            )
        self._keeper.load_state_dict(self._fresh)
        set_epoch(self._keeper, self.epoch)
        self._was_begun = False
        with randomness.preserved():
            if self._at_start is not None:
                randomness.restore(self._at_start)
            self._iterator = iter(self._loader)
            for _ in range(position):
                next(self._iterator, None)
        return read_again(position)
