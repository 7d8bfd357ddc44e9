"""What differs between ranks as leaves: compared, kept, merged and united, and attributes beside the state."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from trainmedic.torch.checkpoints.digests import KnownDigests
from trainmedic.torch.checkpoints.rank_states import RankState, compare_states, leaf_digests, merge, own_part, unite
from trainmedic.torch.state_parts import ATTRIBUTES, StateParts


class TwoRanks:
    """The group of rank 1, whose fellow holds `first`; each poll gives what that one would have said."""

    rank, world_size = 1, 2

    def __init__(self, first: dict[str, Any]) -> None:
        self.first = first

    def _parts(self) -> dict[str, dict[str, str]]:
        parts: dict[str, dict[str, str]] = {}
        for path, digest in leaf_digests(self.first, KnownDigests()).items():
            parts.setdefault(path[0], {})[repr(list(path))] = digest
        return parts

    def poll(self, value: Any = None, patience: float = 0.0) -> Any:
        from trainmedic.torch.checkpoints import rank_states

        return {0: {part: rank_states._hashed(sorted(held.items())) for part, held in self._parts().items()}, 1: value}

    def choose(self, make: Any, patience: float = 0.0) -> Any:
        return {text: digest for held in self._parts().values() for text, digest in held.items()}


def compared(mine: dict[str, Any], first: dict[str, Any]) -> RankState:
    group: Any = TwoRanks(first)
    state = compare_states(mine, group, KnownDigests())
    assert state is not None
    return state


FIRST: dict[str, Any] = {
    "model": {"weight": torch.ones(2), "mean": torch.zeros(1)},
    "optimizer": {"state": {0: {"momentum": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
}


@pytest.mark.parametrize(
    "mine",
    [
        FIRST,
        {**FIRST, "optimizer": {**FIRST["optimizer"], "state": {1: {"momentum": torch.zeros(2)}}}},
        {**FIRST, "optimizer": {**FIRST["optimizer"], "state": {}}},
        {**FIRST, "model": {**FIRST["model"], "mean": torch.ones(1)}},
        {**FIRST, "optimizer": {**FIRST["optimizer"], "state": {0: {"momentum": torch.ones(1, 2)}}}},
        {**FIRST, "optimizer": {"state": {0: {"momentum": torch.ones(2), "step": 3}}, "param_groups": [{"lr": 0.2}]}},
        {**FIRST, ATTRIBUTES: {"optimizer": {"values": {"count": 3}, "inner": {}}}},
    ],
)
def test_a_rank_keeps_what_differs_and_gets_it_back(mine: dict[str, Any]) -> None:
    """Other values, other shapes, entries that only one of them has: nothing else is kept, and nothing is lost."""
    state = compared(mine, FIRST)
    kept = own_part(mine, RankState.from_plain(state.plain()), 1)
    assert len(kept["own"]) < len(leaf_digests(mine, KnownDigests()))
    loaded = {part: dict(held) for part, held in FIRST.items()}
    loaded["optimizer"]["state"] = {0: {"momentum": torch.ones(2)}}
    merge(loaded, kept)
    cache = KnownDigests()
    assert leaf_digests(loaded, cache) == leaf_digests(mine, cache)


def test_where_it_is_not_known_what_differs_all_is_kept() -> None:
    """The ranks could not compare: then each keeps all that it has."""
    mine = {"model": {"weight": torch.zeros(2)}}
    loaded = {"model": {"weight": torch.ones(2), "other": torch.ones(1)}}
    merge(loaded, own_part(mine, None, 1))
    assert loaded["model"].keys() == {"weight"}
    assert not loaded["model"]["weight"].any()


def test_what_differs_by_a_fault_is_not_kept() -> None:
    """Of a part whose weights have changed by themselves every rank is to get those of rank 0."""
    mine = {**FIRST, "model": {**FIRST["model"], "weight": torch.zeros(2)}}
    state = compared(mine, FIRST)
    assert own_part(mine, RankState(1, state.parts, state.own, state.digests, ("model",)), 1)["own"] == []


def test_states_of_other_owners_are_united_and_others_are_not() -> None:
    """Each parameter's momentum on one rank makes a whole; two values for one parameter belong to their ranks."""
    second = {**FIRST, "optimizer": {**FIRST["optimizer"], "state": {1: {"momentum": torch.zeros(2)}}}}
    states = [compared(FIRST, second), compared(second, FIRST)]
    owns = [own_part(held, state, rank) for rank, (held, state) in enumerate(zip((FIRST, second), states, strict=True))]
    whole = unite(owns, states, "optimizer")
    assert whole is not None
    loaded = {part: dict(held) for part, held in FIRST.items()}
    merge(loaded, whole)
    assert sorted(loaded["optimizer"]["state"]) == [0, 1]
    other = {**FIRST, "optimizer": {**FIRST["optimizer"], "state": {0: {"momentum": torch.zeros(2)}}}}
    states = [compared(FIRST, other), compared(other, FIRST)]
    assert unite([own_part(FIRST, states[0], 0), own_part(other, states[1], 1)], states, "optimizer") is None


class Counting(torch.optim.SGD):
    """It keeps things beside its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.rank = 3
        self.count = 0
        self.noise = random.Random(1)
        self.generator = torch.Generator().manual_seed(2)
        self.error: dict[Any, torch.Tensor] = {}
        self.history: list[Any] = []
        self.unknown = object()

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.history.append([self.count, self.noise.random()])
        for parameter in self.param_groups[0]["params"]:
            self.error[parameter] = torch.rand(2, generator=self.generator)


def seen(optimizer: Counting) -> list[Any]:
    numbers = [optimizer.noise.getstate(), optimizer.generator.get_state().tolist()]
    return [optimizer.count, [*optimizer.history], [each.tolist() for each in optimizer.error.values()], *numbers]


def made(rank: int = 3) -> tuple[Counting, StateParts]:
    model = nn.Linear(2, 1)
    optimizer = Counting(model.parameters())
    optimizer.rank = rank
    return optimizer, StateParts(model=model, optimizer=optimizer)


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(member) for key, member in value.items()}
    return [copied(member) for member in value] if isinstance(value, list) else value


def test_attributes_that_training_changes_go_back_and_into_a_new_process() -> None:
    """Counts, generators, errors by parameter; what the script alone sets stays as the new script has it."""
    optimizer, parts = made()
    start, before = copied(parts.capture()), seen(optimizer)
    optimizer.step()
    optimizer.step()
    held, then = copied(parts.capture()), seen(optimizer)
    optimizer.step()
    parts.restore(held)
    assert seen(optimizer) == then
    assert optimizer.error.keys() == set(optimizer.param_groups[0]["params"])
    again, others = made(rank=5)
    others.restore(held)
    assert (seen(again), again.rank) == (then, 5)
    again.step()
    optimizer.step()
    assert seen(again) == seen(optimizer)
    parts.restore(start)
    assert seen(optimizer)[0] == before[0]
    assert ATTRIBUTES not in StateParts(model=nn.Linear(1, 1)).capture()
