"""The batches that a Trainer trains on, seen where they are used: at the loss.

What a data loader yields may not be what the loss gets. Trainers of reinforcement learning take prompts from the
loader, sample completions, and train on these several times. `UsedBatches` sees what `compute_loss` is called with in a
training step. A Trainer that computes its loss elsewhere is seen at the first call of its model with gradients.

Batches that the model itself has sampled since a restart are no proof of it: the model that sampled in their place
before may have been the one that the rollback undoes. The comparison ends where the model begins to sample.

`HuggingFaceLoop` uses it around ``Trainer.train``. Not here: the comparison of batches (`RollbackProof`).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Mapping

import torch

from trainmedic.torch import randomness
from trainmedic.trainer.rollback_proof import RollbackProof

MADE = "the model samples its batches, and from here on it does so anew"
_STEP, _LOSS = "training_step", "compute_loss"


class UsedBatches:
    """While the context lasts, ``proof`` is told each batch of the trainer's steps.

    ``why_not`` says why these may be others than before; empty where they are to be the same. ``makes_batches`` is set
    when the model samples without gradients before the loss of a step.
    """

    makes_batches = False

    def __init__(self, trainer: Any, proof: RollbackProof, why_not: str = "") -> None:
        self._trainer = trainer
        self._proof = proof
        self._why_not = why_not
        self._step: Any = None
        self._loss: Any = None
        self._hook: Any = None
        self._loaded: Any = None  # the batch of the loader in the present step; None outside of one, or when noted
        self._before: Any = None
        # The random numbers before the first batch of this course that was made with them: later ones may be parts
        # of it. None where none was.
        self._random_since: Any = None
        # The same before the batches of the present step were drawn; None where they were made without.
        self._drawn_since: Any = None

    def __enter__(self) -> UsedBatches:
        self._step, self._loss = getattr(self._trainer, _STEP), getattr(self._trainer, _LOSS)
        setattr(self._trainer, _STEP, self._take_step)
        setattr(self._trainer, _LOSS, self._compute_loss)
        if not getattr(self._trainer.args, "torch_compile", False):  # the hook would be compiled with the model
            self._hook = self._trainer.model.register_forward_pre_hook(self._forward, with_kwargs=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        for name in (_STEP, _LOSS):
            vars(self._trainer).pop(name, None)

    def drawing(self) -> None:
        """Take note that the loader is about to be asked for batches."""
        self._before = self._proof.before_draw()

    def drawn(self) -> None:
        """Take note that the loader has given the batches of the next step."""
        has_moved = self._before is not None and randomness.has_moved(self._before)
        self._drawn_since = self._before if has_moved else None
        self._look_at_random_numbers()

    def _take_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self._loaded, self._before = (inputs,), self._proof.before_draw()
        try:
            result = self._step(model, inputs, *arguments, **options)
            self._note(None)  # where it was seen nowhere, nothing is known of it
            self._proof.losses.add(result)
            return result
        finally:
            self._loaded = None

    def _compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self._note(inputs)
        return self._loss(model, inputs, *arguments, **options)

    def _forward(self, module: Any, arguments: Any, options: Any) -> None:
        if self._loaded is None:
            return
        if torch.is_grad_enabled():
            self._note((arguments, options))
        elif not self.makes_batches:
            self.makes_batches = True
            self._why_not = self._why_not or MADE
            self._proof.expect_no_more(self._why_not)

    def _note(self, used: Any) -> None:
        """Tell the proof of the batch of this step, once."""
        if self._loaded is None:
            return
        (loaded,), self._loaded = self._loaded, None
        self._look_at_random_numbers()
        epoch = int(self._trainer.state.epoch or 0)
        since = self._drawn_since if _is_loaded(used, loaded) else self._random_since
        self._proof.drawn(_content(used, loaded), epoch, since, self._why_not)

    def _look_at_random_numbers(self) -> None:
        if self._random_since is None and self._before is not None and randomness.has_moved(self._before):
            self._random_since = self._before


def _is_loaded(used: Any, loaded: Any) -> bool:
    """Return whether a batch is what the loader has given, on any device."""
    if used is loaded:
        return True
    return isinstance(used, Mapping) and isinstance(loaded, Mapping) and set(used) == set(loaded)


def _content(used: Any, loaded: Any) -> Any:
    """Return what two equal batches have in common: all of one that the loader has given.

    Of one that the trainer has made, only what is no computed figure. The last bits of such figures differ on devices
    whose kernels are not deterministic, and the tokens that they belong to say which batch it is.
    """
    if not isinstance(used, Mapping):
        return used
    if _is_loaded(used, loaded):
        return used
    tokens = {name: value for name, value in used.items() if not _is_computed(value)}
    return tokens if any(isinstance(value, torch.Tensor) for value in tokens.values()) else used


def _is_computed(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())
