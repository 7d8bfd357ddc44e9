"""Batches that a Trainer loads and those that it trains on.

Comparison stops at sampled batches: the abandoned model may have sampled others.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any, Callable, Iterator, Mapping

import torch

from trainmedic.torch import randomness
from trainmedic.torch.meters.step_meter import StepMeter
from trainmedic.torch.model_hook import ModelHook
from trainmedic.trainer.patching import replaced
from trainmedic.trainer.rollback_proof import RollbackProof

SAMPLED = "the model samples its batches, and samples new ones from here on"
# Methods of the Trainer.
_DRAW, _COUNT, _PLAN = "get_batch_samples", "_get_num_items_in_batch", "set_initial_training_values"
_STEP, _LOSS = "training_step", "compute_loss"
# Settings of TRL's GRPO: steps per sampling, and how often its completions are used.
_PER_SAMPLING, _REPEATS = "steps_per_generation", "num_iterations"
_OTHER_EPOCH = "the batches to leave out reach beyond the end of the epoch, and the next one may have another order"


class UsedBatches:
    """Reporter of each used batch to ``proof``.

    ``why_not``: reason why batches may differ. ``makes_batches``: the model samples before a step's loss.
    """

    makes_batches = False

    def __init__(self, trainer: Any, proof: RollbackProof, why_not: str = "") -> None:
        self._trainer = trainer
        self._proof = proof
        self._why_not = why_not
        # The Trainer's own methods, during `reporting`.
        self._step: Any = None
        self._loss: Any = None
        self._loaded: Any = None  # 1-tuple of the loader's batch in the current step; None once it is reported
        self._before: Any = None  # random state before the last draw, or before the step
        # Random state before the first batch of this course that used it; later batches may be parts of it. None if no
        # batch did.
        self._random_since: Any = None
        # Random state before the current step's batches were drawn; None if they did not use it.
        self._drawn_since: Any = None

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        trainer = self._trainer
        self._step, self._loss = getattr(trainer, _STEP), getattr(trainer, _LOSS)
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(trainer, **{_STEP: self._training_step, _LOSS: self._observed_loss}))
            if not getattr(trainer.args, "torch_compile", False):  # the hook would be compiled with the model
                hook = ModelHook(self._forward)
                stack.callback(trainer.model.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def before_draw(self) -> None:
        self._before = self._proof.before_draw()

    def after_draw(self) -> None:
        has_moved = self._before is not None and randomness.has_moved(self._before)
        self._drawn_since = self._before if has_moved else None
        self._remember_random_use()

    def expect_other_epoch(self) -> None:
        self._why_not = self._why_not or _OTHER_EPOCH

    def _training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self._loaded, self._before = (inputs,), self._proof.before_draw()
        try:
            result = self._step(model, inputs, *arguments, **options)
            self._report_used(None)  # if it was not observed, nothing is known of it
            self._proof.losses.add(result)
            return result
        finally:
            self._loaded = None

    def _observed_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self._report_used(inputs)
        return self._loss(model, inputs, *arguments, **options)

    def _forward(self, module: Any, arguments: Any, options: Any) -> None:
        if self._loaded is None:
            return
        if torch.is_grad_enabled():
            self._report_used((arguments, options))
        elif not self.makes_batches:
            self.makes_batches = True
            self._why_not = self._why_not or SAMPLED
            self._proof.stop_comparing(self._why_not)

    def _report_used(self, used: Any) -> None:
        """Report the step's batch once; None if unknown."""
        if self._loaded is None:
            return
        (loaded,), self._loaded = self._loaded, None
        self._remember_random_use()
        epoch = int(self._trainer.state.epoch or 0)
        since = self._drawn_since if _is_loaded(used, loaded) else self._random_since
        self._proof.drawn(_content(used, loaded), epoch, since, self._why_not)

    def _remember_random_use(self) -> None:
        if self._random_since is None and self._before is not None and randomness.has_moved(self._before):
            self._random_since = self._before


def batches_per_sampling(trainer: Any) -> int | None:
    """Return how many of the loader's batches share one sampling, as in TRL's GRPO, or None."""
    steps, times = getattr(trainer.args, _PER_SAMPLING, None), getattr(trainer, _REPEATS, None)
    return max(steps * times, 1) if isinstance(steps, int) and isinstance(times, int) else None


class LoadedBatches:
    """Batches from a Trainer's loader, with some skipped and the wait measured.

    ``skip`` batches are read but not trained on, over the ends of epochs. With ``max_steps`` further epochs replace
    them. A shortened epoch's incomplete last step is skipped too.
    """

    def __init__(
        self, trainer: Any, skip: int, used: UsedBatches, meter: Callable[[], StepMeter | None] = lambda: None
    ) -> None:
        self._trainer = trainer
        self._used = used
        self._meter = meter
        self._left_to_skip = self._to_skip = skip
        self._originals: dict[str, Any] = {}
        self._epoch: Any = None  # iterator of the current epoch
        self._is_shortened = False  # batches of that epoch were skipped
        self._skipped_before_epoch = 0
        self._has_trained = False  # on a batch of that epoch
        self._counting_seconds = 0.0  # in the current draw
        self.is_passed_over = False  # the rest of that epoch is skipped
        self.skipped = 0

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        members = {_DRAW: self._draw_after_skips}
        if hasattr(self._trainer, _COUNT):
            members[_COUNT] = self._count
        if self._to_skip and self._trainer.args.max_steps > 0:
            members[_PLAN] = self._plan
        self._originals = {name: getattr(self._trainer, name) for name in members}
        with replaced(self._trainer, **members):
            yield

    def _plan(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Plan more epochs, to replace skipped batches."""
        epochs, steps_per_epoch, *others = self._originals[_PLAN](*arguments, **options)
        accumulation = self._trainer.args.gradient_accumulation_steps
        # One step more, for the last one of the shortened epoch, which may lack batches.
        further = (self._to_skip + accumulation) // (steps_per_epoch * accumulation) + 1
        return (epochs + further, steps_per_epoch, *others)

    def _draw_after_skips(self, batches: Iterator[Any], count: int, *arguments: Any, **options: Any) -> Any:
        if batches is not self._epoch:
            self._epoch, self._is_shortened, self._skipped_before_epoch = batches, self._left_to_skip > 0, self.skipped
            self._has_trained = self.is_passed_over = False
        if self.is_passed_over:
            return [], None
        self._used.before_draw()
        if self._is_shortened:
            self._skip(batches)
        samples, items = self._draw(batches, count, *arguments, **options)
        self._used.after_draw()
        if self._is_shortened and len(samples) < count:
            self.skipped += len(samples)
            if not self._has_trained and self.skipped > self._skipped_before_epoch:  # else the data is empty
                self.is_passed_over = True
                self._used.expect_other_epoch()
            return [], None
        self._has_trained = True
        return samples, items

    def _skip(self, batches: Iterator[Any]) -> None:
        for _ in itertools.islice(batches, self._left_to_skip):
            self._left_to_skip -= 1
            self.skipped += 1

    def _draw(self, *arguments: Any, **options: Any) -> Any:
        began, self._counting_seconds = time.perf_counter(), 0.0
        samples, items = self._originals[_DRAW](*arguments, **options)
        seconds = time.perf_counter() - began - self._counting_seconds
        meter = self._meter()
        if meter is not None:
            for number, batch in enumerate(samples):
                meter.add_batch(batch, 0.0 if number else seconds)
        return samples, items

    def _count(self, *arguments: Any, **options: Any) -> Any:
        # Counting a batch's tokens waits for the other ranks.
        began, meter = time.perf_counter(), self._meter()
        if meter is not None:
            meter.waits.start()
        items = self._originals[_COUNT](*arguments, **options)
        if meter is not None:
            meter.waits.stop()
        self._counting_seconds += time.perf_counter() - began
        return items


def _is_loaded(used: Any, loaded: Any) -> bool:
    """Return whether it is the loader's batch, not sampled by the model."""
    if used is loaded:
        return True
    return isinstance(used, Mapping) and isinstance(loaded, Mapping) and set(used) == set(loaded)


def _content(used: Any, loaded: Any) -> Any:
    """Return the comparable part of a batch, without computed figures, whose last bits vary."""
    if not isinstance(used, Mapping):
        return used
    if _is_loaded(used, loaded):
        return used
    tokens = {name: value for name, value in used.items() if not _is_computed(value)}
    return tokens if any(isinstance(value, torch.Tensor) for value in tokens.values()) else used


def _is_computed(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())
