"""Leaving out batches of data when a Trainer goes on from a checkpoint.

The Trainer finds its position by itself: after the batches that the checkpoint's steps were trained on. From there
`BatchSkipper` reads further batches and does not train on them; over the end of an epoch too, which gets shorter by
them. A training of ``max_steps`` gets further epochs for them, where it needs them. `HuggingFaceLoop` uses it around
``Trainer.train``.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any, Iterator

from trainmedic.huggingface.used_batches import UsedBatches


class BatchSkipper:
    """While the context lasts, the first ``batches`` that the Trainer asks for are left out.

    It wraps the Trainer's ``get_batch_samples``, which takes the batches of one optimizer step. Two
    things follow from how the Trainer counts: the last step of a shortened epoch is left out where it has too
    few batches, for its gradients would not be applied; and of an epoch that would be left out whole, the last
    step is trained on, for the Trainer ends at an empty epoch. ``skipped`` counts what really was left out.
    """

    def __init__(self, trainer: Any, batches: int, used: UsedBatches) -> None:
        self._trainer = trainer
        self._used = used
        self._left = self._most = batches
        self._original: Any = None
        self._shortened: Any = None  # the iterator of the epoch in which batches were left out
        self._has_trained = False  # whether any batch of that epoch was trained on
        self.skipped = 0

    def __enter__(self) -> BatchSkipper:
        self._original = self._trainer.get_batch_samples
        self._trainer.get_batch_samples = self._take
        if self._most and self._trainer.args.max_steps > 0:
            values = self._trainer.set_initial_training_values
            self._trainer.set_initial_training_values = lambda *args, **options: self._longer(values(*args, **options))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._original is not None:
            del self._trainer.get_batch_samples
        vars(self._trainer).pop("set_initial_training_values", None)

    def _longer(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the Trainer has worked out from ``max_steps``, with as many epochs more as the batches left out take."""
        epochs, steps_per_epoch, *others = values
        accumulation = self._trainer.args.gradient_accumulation_steps
        # A step more than they are, for the last one of the shortened epoch, which may have too few batches.
        further = (self._most + accumulation) // (steps_per_epoch * accumulation) + 1
        return (epochs + further, steps_per_epoch, *others)

    def _take(self, batches: Iterator[Any], count: int, *arguments: Any, **options: Any) -> Any:
        self._used.drawing()
        samples, items = self._take_samples(batches, count, *arguments, **options)
        self._used.drawn()
        return samples, items

    def _take_samples(self, batches: Iterator[Any], count: int, *arguments: Any, **options: Any) -> Any:
        if batches is not self._shortened:
            if not self._left:
                return self._original(batches, count, *arguments, **options)
            self._shortened, self._has_trained = batches, False
        last = self._leave_out(batches, count)
        if last is not None:
            batches = last
        samples, items = self._original(batches, count, *arguments, **options)
        if self._has_trained and len(samples) < count:
            self.skipped += len(samples)
            return [], None
        self._has_trained = True
        return samples, items

    def _leave_out(self, batches: Iterator[Any], count: int) -> Iterator[Any] | None:
        """The epoch's last batches where it ended in here without any to train on, else None."""
        if not self._left:
            return None
        last: deque[Any] = deque(maxlen=count)
        while self._left:
            try:
                last.append(next(batches))
            except StopIteration:
                if self._has_trained:
                    return None
                self.skipped -= len(last)
                return iter(last)
            self._left -= 1
            self.skipped += 1
        return None
