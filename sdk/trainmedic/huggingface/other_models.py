"""The models beside the one that a Trainer trains, in reinforcement learning: they have to follow a rollback.

**A reference model** of TRL's trainers may follow the trained one (``sync_ref_model``). The Trainer does not save it,
and after a rollback it would be one that has followed the abandoned model. So rank 0 keeps its weights in each
checkpoint, in ``trainmedic-reference.pt``; a reference model that stays as it is needs no copy.

**A rollout engine** such as vLLM, which samples completions, holds the weights a second time. After a rollback it still
has those of the course that is given up, until it gets the trainer's. TRL sends them when its step counter has changed,
which a rollback can hide. So `RolloutEngine.behind` lets no engine generate after a restart before it has got the
weights. A ``rollout_func`` that samples elsewhere takes part if it has a method ``sync_weights()``, which sends the
trainer's weights to its engine. A trainer whose engine cannot be reached is not rolled back.

`HuggingFaceFramework` calls both.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from trainmedic.torch.checkpoints.checkpoint_files import add_file
from trainmedic.trainer.patching import replaced

_FILE = "trainmedic-reference.pt"
_SHARDED = "the reference model follows the trained one (sync_ref_model), in shards that no checkpoint holds"
SYNCHRONIZED = "it gets the weights of the checkpoint before it samples again"
_SYNC, _GENERATE = "sync_weights", "generate"
_UNSEEN = (
    "its rollout_func may sample from a copy of the weights that stays as it is: give rollout_func a method "
    "sync_weights() that sends it the trainer's weights, or use_vllm=True"
)
_ASYNCHRONOUS = (
    "its rollout worker samples while the loop starts again, and its queue holds completions of the abandoned model"
)
_UNKNOWN = "it samples with vLLM, and how its engine gets the weights is not known"


class ReferenceModel:
    """The reference model of ``trainer``, on one rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def no_rollback_because(self) -> str:
        """Why it cannot follow a rollback; empty where it can, or where there is none."""
        is_sharded = self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled
        return _SHARDED if self._follows and is_sharded else ""

    def save(self, checkpoint: Path) -> None:
        """Keep its weights in the checkpoint, on the rank that writes. Raises OSError."""
        if self._follows and self._trainer.args.should_save:
            add_file(checkpoint / _FILE, self._trainer.ref_model.state_dict())

    def is_in(self, checkpoint: Path) -> bool:
        """Return whether the checkpoint has all that `restore` needs."""
        return not self._follows or (checkpoint / _FILE).is_file()

    def restore(self, checkpoint: Path) -> None:
        """Load its weights from the checkpoint, on every rank. Raises OSError, and what torch raises."""
        if self._follows:
            weights = torch.load(checkpoint / _FILE, map_location="cpu", weights_only=True)
            self._trainer.ref_model.load_state_dict(weights)

    @property
    def _follows(self) -> bool:
        is_followed = getattr(self._trainer.args, "sync_ref_model", False)
        return bool(is_followed) and isinstance(getattr(self._trainer, "ref_model", None), torch.nn.Module)


class RolloutEngine:
    """The rollout engine of ``trainer``, if it has one."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_behind = False

    @property
    def samples(self) -> bool:
        """Whether completions are sampled from a copy of the weights."""
        return (
            bool(getattr(self._trainer, "use_vllm", False)) or getattr(self._trainer, "rollout_func", None) is not None
        )

    @property
    def no_rollback_because(self) -> str:
        """Why the engine cannot follow a rollback; empty where it can, or where there is none."""
        trainer = self._trainer
        if getattr(trainer, "rollout_worker", None) is not None or getattr(trainer, "rollout_queue", None) is not None:
            return _ASYNCHRONOUS
        if getattr(trainer, "use_vllm", False):
            has_mark = hasattr(trainer, "_last_loaded_step")
            return "" if has_mark or self._vllm is not None else _UNKNOWN
        rollout = getattr(trainer, "rollout_func", None)
        return _UNSEEN if rollout is not None and not callable(getattr(rollout, _SYNC, None)) else ""

    @contextlib.contextmanager
    def behind(self, is_behind: bool) -> Iterator[None]:
        """While the context lasts, the engine gets the weights before it samples for the first time, if it
        ``is_behind``."""
        self._is_behind = is_behind
        with contextlib.ExitStack() as stack:
            vllm = self._vllm
            rollout: Any = getattr(self._trainer, "rollout_func", None)
            if vllm is not None:
                send = getattr(vllm, _SYNC)
                sample = functools.partial(self._sample, send, getattr(vllm, _GENERATE))
                stack.enter_context(replaced(vllm, **{_SYNC: functools.partial(self._sent, send), _GENERATE: sample}))
            elif callable(getattr(rollout, _SYNC, None)):
                sample = functools.partial(self._sample, rollout.sync_weights, rollout)
                stack.enter_context(replaced(self._trainer, rollout_func=sample))
            yield

    @property
    def _vllm(self) -> Any:
        engine = getattr(self._trainer, "vllm_generation", None)
        return engine if all(callable(getattr(engine, name, None)) for name in (_SYNC, _GENERATE)) else None

    def _sent(self, send: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = send(*arguments, **options)
        self._is_behind = False
        return result

    def _sample(self, send: Callable[..., Any], sample: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._is_behind:
            self._sent(send)
        return sample(*arguments, **options)
