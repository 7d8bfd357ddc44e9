"""What becomes of a change of the rate at the end of Megatron-LM's ``train()``, in a process that lives on.

The stand-in of ``tests.integration.engines`` runs, loaded anew, because `protect` replaces its functions for good.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

import trainmedic
import trainmedic.megatron
from tests.integration.engines import megatron_stand_in
from tests.support.command_sender import Sent


class Failed(RuntimeError):
    """What ends a training of these tests."""


class Training:
    """Megatron-LM's module, protected, with what is to be done at which batch, counted from 1."""

    def __init__(self, megatron: ModuleType, medic: trainmedic.Medic, directory: Path) -> None:
        self.module: Any = megatron
        self.acts: dict[int, Any] = {}
        self._batches = self._until = 0
        self._directory = str(directory)
        trainmedic.megatron.protect(medic, module=megatron)
        self._train = self.module.train
        self.module.train = self._note_arguments
        self._arguments: tuple[Any, ...] = ()

    def pretrain(self, until: int) -> None:
        self._until = until
        places = {"save": self._directory, "load": self._directory, "save_interval": 1000}
        self.module.pretrain(self._act, train_iters=100, kind="data", micro_batch_size=8, **places)

    def train_on(self, until: int) -> None:
        """Call ``train()`` once more with the same objects."""
        self.module.ARGS.iteration, self.module.ARGS.train_iters = self._until, until
        self._arguments[6].no_sync_func = None  # the configuration's, which the program has to begin with again
        self._train(*self._arguments)

    def _note_arguments(self, *arguments: Any) -> Any:
        self._arguments = arguments
        self.module.ARGS.train_iters = self._until  # by now the data are there
        return self._train(*arguments)

    def _act(self, _: int) -> None:
        self._batches += 1
        if self._batches in self.acts:
            self.acts[self._batches](None)


def fail(_: Any) -> None:
    raise Failed


@pytest.fixture
def megatron(tmp_path: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("megatron_stand_in_anew", megatron_stand_in.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield module
    dist.destroy_process_group()


def test_an_error_that_ends_train_ends_the_wait_for_a_rate(
    megatron: ModuleType, medic: trainmedic.Medic, sent: Sent, tmp_path: Path
) -> None:
    """The answer comes at once, with what was observed until then."""
    training = Training(megatron, medic, tmp_path / "checkpoints")
    training.acts = {5: sent("job.scale_lr", factor=0.5), 7: fail}
    with pytest.raises(Failed):
        training.pretrain(20)
    assert not medic.unanswered()
    rate = sent.reply().output["verified"]["learning_rate"]
    assert (rate["updates"], rate["why"]) == (1, "training ended")


def test_a_rate_is_observed_in_a_second_train_call_too(
    megatron: ModuleType, medic: trainmedic.Medic, sent: Sent, tmp_path: Path
) -> None:
    """The program calls ``train()`` again with the same optimizer; the updates there show the rate."""
    training = Training(megatron, medic, tmp_path / "checkpoints")
    training.acts = {13: sent("job.scale_lr", factor=0.5)}
    training.pretrain(10)
    training.train_on(40)
    reply = sent.reply()
    assert reply.output["verified"]["learning_rate"]["updates"] == 2
    assert "why" not in reply.output["verified"]["learning_rate"]
