"""What a rank carries beside the checkpoints of a framework: what `CarriedFiles.restore` says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainmedic import ConfigurationError
from trainmedic.trainer.carried_files import CarriedFiles


class Recurrent(nn.Module):
    """It carries a hidden state, once it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None


def begun(also: dict[str, Any] | None = None) -> tuple[CarriedFiles, Recurrent]:
    model, carried = Recurrent(), CarriedFiles(1, also)
    carried.begin([model])
    return carried, model


def test_state_and_random_numbers_go_back_to_the_checkpoint(tmp_path: Path) -> None:
    counted = [0]
    carried, model = begun({"counted": counted})
    model.hidden, counted[0] = torch.ones(3), 7
    carried.save(tmp_path)
    drawn = torch.rand(4)
    model.hidden, counted[0] = torch.full((3,), torch.nan), 9
    assert carried.restore(tmp_path) == {"compared": 2, "agreed": 2}
    assert (model.hidden.tolist(), counted) == ([1.0] * 3, [7])
    assert torch.equal(torch.rand(4), drawn)


def test_a_checkpoint_without_a_file_claims_nothing(tmp_path: Path) -> None:
    """What modules carry is as it was at first, and the answer says why nothing was compared."""
    carried, model = begun({"counted": [0]})
    model.hidden = torch.full((3,), torch.nan)
    assert carried.restore(tmp_path) == {"compared": 0, "agreed": 0, "why": "the checkpoint holds none"}
    assert model.hidden is None
    (tmp_path / "trainmedic-carried-00001.pt").write_bytes(b"half")
    assert carried.restore(tmp_path)["why"] == "trainmedic-carried-00001.pt cannot be read"


class Rotary(nn.Module):
    """It needs what it was made with; ``hidden`` begins as a tensor, and training puts others in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.ones(3), persistent=False)
        self.frequencies = torch.ones(3)
        self.masks = {"causal": torch.ones(3)}
        self.hidden = torch.zeros(3)


def test_what_a_model_was_made_with_stays_without_a_file(tmp_path: Path) -> None:
    """Such as at the start from a checkpoint that the framework alone, an earlier release or fewer ranks wrote."""
    model, carried = Rotary(), CarriedFiles(1, None)
    carried.begin([model])
    assert carried.restore(tmp_path) == {"compared": 0, "agreed": 0, "why": "the checkpoint holds none"}
    for tensor in (model.positions, model.frequencies, model.masks["causal"], model.hidden + 1):
        assert torch.equal(tensor, torch.ones(3))  # type: ignore[arg-type]


def test_a_training_that_carries_nothing_says_nothing(tmp_path: Path) -> None:
    carried, _ = begun()
    carried.save(tmp_path)
    assert carried.restore(tmp_path) == {}
    assert carried.restore(tmp_path / "another") == {}


def test_a_function_of_the_user_that_fails_is_no_rollback(tmp_path: Path) -> None:
    def put(value: int) -> None:
        raise RuntimeError("no place for it")

    carried, _ = begun({"value": (lambda: 1, put)})
    carried.save(tmp_path)
    told = carried.restore(tmp_path)
    assert told["agreed"] < told["compared"]
    assert "no place for it" in told["different"]


def test_state_that_cannot_be_copied_is_refused() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object()}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="odd: the state_dict of a Odd holds a object"):
        CarriedFiles(0, {"odd": Odd()})
