"""Trainmedic for the Hugging Face Trainer, and for what builds on it.

- `train` runs a Trainer, and carries out everything, restarts of its loop included.
- `protect` does so for programs that make and run the Trainer themselves, such as LLaMA-Factory.
- `Callback` alone carries out what needs no restart.

``trainmedic.huggingface.ms_swift`` is the plugin for ms-swift. This package needs transformers and torch.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import transformers

from trainmedic.client import Medic, connect
from trainmedic.huggingface.callback import Callback
from trainmedic.huggingface.framework import HuggingFaceFramework
from trainmedic.recovery.restarts import RestartLimits as Limits
from trainmedic.trainer.patching import replaced

__all__ = ["Callback", "Limits", "protect", "run_by", "train"]

_DEFAULT = Limits()


def train(
    trainer: Any,
    job: str | None = None,
    *,
    medic: Medic | None = None,
    resume_from_checkpoint: str | bool | None = None,
    limits: Limits = _DEFAULT,
    **options: Any,
) -> Any:
    """Instead of ``trainer.train()``: train, restarting the loop where a command or a crash makes it necessary.

    Returns the last loop's ``TrainOutput``. ``job`` is the name that alerts call the job by; ``medic`` a
    connection that you made, and close, yourself. Further ``options`` go to ``trainer.train``. Raises what the
    Trainer raises, when it has done so too often.
    """
    own = None if medic is not None or _callback_of(trainer) is not None else connect(job)
    try:
        return _run(trainer, medic or own, trainer.train, (resume_from_checkpoint,), options, limits)
    finally:
        if own is not None:
            own.close()


@contextlib.contextmanager
def protect(job: str | None = None, *, medic: Medic | None = None, limits: Limits = _DEFAULT) -> Iterator[Medic]:
    """While the context lasts, each Trainer that trains does so as by `train`.

    This is for programs that run the Trainer deep inside themselves. ``transformers.Trainer.train`` is replaced for
    that long; nothing else is touched.
    """
    connection = medic or connect(job)
    original = transformers.Trainer.train

    def train_protected(self: Any, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        call = functools.partial(original, self)
        return _run(self, connection, call, (resume_from_checkpoint, *arguments), options, limits)

    try:
        with replaced(transformers.Trainer, train=train_protected):
            yield connection
    finally:
        if medic is None:
            connection.close()


def run_by(callback: Callback, trainer: Any, limits: Limits = _DEFAULT) -> None:
    """Replace ``trainer.train()`` of this one Trainer by `train`; for plugins that are given the Trainer."""
    original = trainer.train

    def train_restarting(resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        return _run(trainer, callback.medic, original, (resume_from_checkpoint, *arguments), options, limits)

    trainer.train = train_restarting


def _run(
    trainer: Any,
    medic: Medic | None,
    original: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    limits: Limits,
) -> Any:
    present = _callback_of(trainer)
    if present is not None and present.framework is not None:  # `train` was called within `protect`, whose loop does
        return original(*arguments, **options)
    callback = present
    if callback is None:
        assert medic is not None
        callback = Callback(medic)
        trainer.add_callback(callback)
    framework = HuggingFaceFramework(trainer, callback.medic, limits)
    callback.attach(framework)
    try:
        return framework.train(original, *arguments, **options)
    finally:
        callback.attach(None)
        if present is None:
            trainer.remove_callback(callback)


def _callback_of(trainer: Any) -> Callback | None:
    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, Callback)), None)
