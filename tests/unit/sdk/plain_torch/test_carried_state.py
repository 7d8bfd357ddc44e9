"""Carried state that was restored counts as compared only if it was read again."""

from __future__ import annotations

from typing import Any

import pytest

from trainmedic.torch.carried_state import CarriedState, CarriedValue


@pytest.mark.parametrize(("kept", "outcome"), [([1], {"compared": 1, "agreed": 1}), ([object()], {})])
def test_what_cannot_be_read_again_does_not_agree(kept: list[Any], outcome: dict[str, int]) -> None:
    """A setter of the user may leave something else."""
    values: list[Any] = [1]

    def put(_: Any) -> None:
        values[:] = kept

    state = CarriedState(named={"buffer": CarriedValue(lambda: values, put)})
    assert state.put_back(state.take()) == outcome
