"""Trainmedic for the Hugging Face Trainer.

- `train` runs a Trainer with all commands.
- `protect` does so in programs that run it themselves, such as LLaMA-Factory.
- `Callback` alone carries out commands without a restart.

``trainmedic.huggingface.ms_swift`` is the plugin for ms-swift.
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
    """Train like ``trainer.train()``; restart the loop after commands and crashes that need it.

    Returns the last loop's ``TrainOutput``. ``job`` is the name in alerts. A given ``medic`` stays open. Raises the
    Trainer's error after too many failures.
    """
    own = None if medic is not None or _callback_of(trainer) is not None else connect(job)
    try:
        return _run(trainer, medic or own, trainer.train, (resume_from_checkpoint,), options, limits)
    finally:
        if own is not None:
            own.close()


@contextlib.contextmanager
def protect(job: str | None = None, *, medic: Medic | None = None, limits: Limits = _DEFAULT) -> Iterator[Medic]:
    """Make every Trainer train as by `train` during the context."""
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
    """Make ``train()`` work like `train`; for plugins that get the Trainer."""
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
    if present is not None and present.framework is not None:  # within `protect`
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
