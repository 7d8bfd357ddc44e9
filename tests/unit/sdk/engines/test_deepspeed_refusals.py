"""What `trainmedic.deepspeed.attach` refuses at once, before it has talked to anybody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import trainmedic.deepspeed
from trainmedic import ConfigurationError, Medic

NOBODY = cast(Medic, None)


class Engine:
    """An engine with the functions that are called, and a configuration."""

    def __init__(self, *switched_on: str, decoupled: bool = False) -> None:
        self._switched_on = switched_on
        self.optimizer: Any = SimpleNamespace(param_groups=[])
        self.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: decoupled)

    def _called(self, *_: Any, **__: Any) -> None:
        raise AssertionError("nothing is done with an engine that is refused")

    save_checkpoint = load_checkpoint = set_train_batch_size = set_train_micro_batch_size = _called
    gradient_accumulation_steps = is_gradient_accumulation_boundary = _called

    def use_node_local_storage(self) -> bool:
        return "checkpoint.use_node_local_storage" in self._switched_on

    def load_universal_checkpoint(self) -> bool:
        return "checkpoint.load_universal" in self._switched_on

    def zero_nvme_offload_optimizer(self) -> bool:
        return "zero_optimization.offload_optimizer.device: nvme" in self._switched_on


class PipelineEngine(Engine):
    """One that draws its batches by itself."""

    train_batch = Engine._called


def reason(engine: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        trainmedic.deepspeed.attach(NOBODY, engine, **options)
    return str(refused.value)


def test_what_is_no_engine_is_refused() -> None:
    """Such as the model, of which an engine would pass on the attributes, by the function that it lacks."""
    model = SimpleNamespace(save_checkpoint=print)
    assert "a SimpleNamespace has no save_checkpoint(); give the first result of deepspeed.initialize()" in reason(
        model
    )


def test_a_pipeline_engine_is_refused_with_what_to_do_instead() -> None:
    """It has no step boundary between its batches."""
    assert "call medic.report() and medic.commands() around train_batch()" in reason(PipelineEngine())


def test_an_engine_without_an_optimizer_is_refused() -> None:
    """One for inference takes no steps."""
    engine = Engine()
    engine.optimizer = None
    assert "it has no optimizer" in reason(engine)


@pytest.mark.parametrize(
    "setting",
    [
        "checkpoint.use_node_local_storage",
        "checkpoint.load_universal",
        "zero_optimization.offload_optimizer.device: nvme",
    ],
)
def test_checkpoints_that_nobody_could_call_whole_are_refused_by_their_setting(setting: str) -> None:
    """The setting is named as it stands in DeepSpeed's configuration."""
    assert f"with {setting} in DeepSpeed's configuration" in reason(Engine(setting), checkpoints="checkpoints")


def test_checkpoints_that_are_written_in_the_background_are_refused() -> None:
    """When saving returns, they would not be whole."""
    assert "checkpoint.writer" in reason(Engine(decoupled=True), checkpoints="checkpoints")
