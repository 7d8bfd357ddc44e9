"""Rollback of the additional models in reinforcement learning.

**Reference model**: TRL's ``sync_ref_model`` updates it without the Trainer saving it, so rank 0 stores its weights.

**Rollout engine**, such as vLLM: TRL updates its weights when the step counter changes, which a rollback can hide, so
its first sampling updates it.
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
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def no_rollback_because(self) -> str:
        is_sharded = self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled
        return _SHARDED if self._follows and is_sharded else ""

    def save(self, checkpoint: Path) -> None:
        if self._follows and self._trainer.args.should_save:
            add_file(checkpoint / _FILE, self._trainer.ref_model.state_dict())

    def is_in(self, checkpoint: Path) -> bool:
        return not self._follows or (checkpoint / _FILE).is_file()

    def restore(self, checkpoint: Path) -> None:
        if self._follows:
            weights = torch.load(checkpoint / _FILE, map_location="cpu", weights_only=True)
            self._trainer.ref_model.load_state_dict(weights)

    @property
    def _follows(self) -> bool:
        is_followed = getattr(self._trainer.args, "sync_ref_model", False)
        return bool(is_followed) and isinstance(getattr(self._trainer, "ref_model", None), torch.nn.Module)


class RolloutEngine:
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_outdated = False  # its weights are those of the abandoned model

    @property
    def samples(self) -> bool:
        return (
            bool(getattr(self._trainer, "use_vllm", False)) or getattr(self._trainer, "rollout_func", None) is not None
        )

    @property
    def no_rollback_because(self) -> str:
        trainer = self._trainer
        if getattr(trainer, "rollout_worker", None) is not None or getattr(trainer, "rollout_queue", None) is not None:
            return _ASYNCHRONOUS
        if getattr(trainer, "use_vllm", False):
            # TRL's step of the engine's weights; `TrainerState` resets it, so that TRL sends them again.
            has_mark = hasattr(trainer, "_last_loaded_step")
            return "" if has_mark or self._vllm is not None else _UNKNOWN
        rollout = getattr(trainer, "rollout_func", None)
        return _UNSEEN if rollout is not None and not callable(getattr(rollout, _SYNC, None)) else ""

    @contextlib.contextmanager
    def updating(self, is_outdated: bool) -> Iterator[None]:
        self._is_outdated = is_outdated
        with contextlib.ExitStack() as stack:
            vllm = self._vllm
            rollout: Any = getattr(self._trainer, "rollout_func", None)
            if vllm is not None:
                send = getattr(vllm, _SYNC)
                sample = functools.partial(self._sample, send, getattr(vllm, _GENERATE))
                stack.enter_context(replaced(vllm, **{_SYNC: functools.partial(self._send, send), _GENERATE: sample}))
            elif callable(getattr(rollout, _SYNC, None)):
                sample = functools.partial(self._sample, rollout.sync_weights, rollout)
                stack.enter_context(replaced(self._trainer, rollout_func=sample))
            yield

    @property
    def _vllm(self) -> Any:
        engine = getattr(self._trainer, "vllm_generation", None)
        return engine if all(callable(getattr(engine, name, None)) for name in (_SYNC, _GENERATE)) else None

    def _send(self, send: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = send(*arguments, **options)
        self._is_outdated = False
        return result

    def _sample(self, send: Callable[..., Any], sample: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._is_outdated:
            self._send(send)
        return sample(*arguments, **options)
