"""Which states of a DeepSpeed engine the ranks compare, as the engine writes those of rank 0 alone; damaged files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from trainmedic.deepspeed.engine_checkpoints import EngineContents
from trainmedic.deepspeed.engine_parts import EngineParts
from trainmedic.torch.checkpoints.checkpoint_storage import UnusableCheckpoint
from trainmedic.torch.state_parts import StateParts

STATE = {"state": {0: {"momentum_buffer": 1.0}}}


def engine(stage: int = 0, experts: bool = False, data_ranks: int = 2, **of_optimizer: Any) -> Any:
    """An engine as far as it is asked. Not modelled: what it writes and loads."""
    return SimpleNamespace(
        optimizer=SimpleNamespace(state_dict=lambda: STATE, **of_optimizer),
        zero_optimization_stage=lambda: stage,
        has_moe_layers=experts,
        dp_world_size=data_ranks,
    )


def compared(made: Any) -> Any:
    return EngineContents(made, rank=1, world_size=2).comparable(cast(StateParts, None))


def test_without_zero_the_optimizer_is_compared() -> None:
    assert compared(engine()) == {"optimizer": STATE}


@pytest.mark.parametrize(
    "made",
    [engine(stage=1), engine(experts=True), engine(data_ranks=1), engine(dp_process_group=object())],
    ids=["ZeRO", "experts", "parts of a model", "an optimizer with partitions"],
)
def test_what_the_engine_writes_of_each_rank_is_left_to_it(made: Any) -> None:
    """Such an optimizer does not take its own ``state_dict()`` back, but the list of all ranks' states."""
    assert compared(made) is None


@pytest.mark.parametrize(("place", "damage"), [(8, 1), (10, 99)], ids=["encrypted", "an unknown compression"])
def test_a_file_with_a_damaged_directory_is_unusable(tmp_path: Path, place: int, damage: int) -> None:
    """So that an older checkpoint is tried."""
    file = tmp_path / "model.pt"
    torch.save({"weight": torch.zeros(3)}, file)
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\1\2") + place] = damage
    file.write_bytes(content)
    contents = EngineContents(engine(), rank=0, world_size=1)
    with pytest.raises(UnusableCheckpoint, match=r"model\.pt cannot be read"):
        contents.read(tmp_path, [file], cast(StateParts, None), checked=True)


def test_a_file_for_which_memory_is_missing_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may be intact, and an older one needs as much."""
    monkeypatch.setattr(zipfile, "ZipFile", Mock(side_effect=MemoryError))
    contents = EngineContents(engine(), rank=0, world_size=1)
    with pytest.raises(MemoryError):
        contents.read(tmp_path, [tmp_path / "model.pt"], cast(StateParts, None), checked=True)


def test_a_further_part_may_be_called_engine() -> None:
    """By ``attach(also=...)``: only `model` is taken."""
    parts = EngineParts(SimpleNamespace(module=torch.nn.Linear(1, 1)), engine=torch.nn.Linear(1, 1))
    assert list(parts.by_name) == ["model", "engine"]
