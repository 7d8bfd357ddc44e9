"""What several ranks load is compared on each of them; one bit on one rank is enough. Rank by rank in threads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.rank_threads import RankThread, RankThreads, everywhere
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth, problem
from trainmedic.torch import optimizer_states
from trainmedic.torch.checkpoints.checkpoint_storage import HalfLoaded, UnusableCheckpoint
from trainmedic.torch.checkpoints.digests import are_finite, compare, digests
from trainmedic.torch.checkpoints.joint_checkpoints import JointCheckpointDirectory
from trainmedic.torch.checkpoints.loading import CheckpointLoading, LoadedCheckpoint
from trainmedic.torch.checkpoints.rank_states import RankState
from trainmedic.torch.checkpoints.replicated_contents import ReplicatedContents
from trainmedic.torch.state_parts import StateParts

SIZE = 2


class Parts(StateParts):
    """A training of one layer. ``broken`` are the steps whose weights do not arrive as they are in the checkpoint."""

    def __init__(self, value: float = 0.0) -> None:
        self.model = nn.Linear(2, 2)
        nn.init.constant_(self.model.weight, value)
        super().__init__(model=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.broken: set[float] = set()
        self.fails = False

    def restore(self, states: Any) -> None:
        super().restore(states)
        if self.fails:
            raise RuntimeError("out of memory")
        if self.model.weight[0, 0].item() in self.broken:
            with torch.no_grad():
                self.model.weight.view(torch.int32)[0, 0] ^= 1


def storage(path: Path, member: RankThread) -> JointCheckpointDirectory:
    return JointCheckpointDirectory(path, None, member, ReplicatedContents(member.rank))


def save(ranks: RankThreads, path: Path, step: int, drifted: int | None = None) -> SavedCheckpoint:
    """A checkpoint whose weights are its step; ``drifted`` is a rank whose own are others, unnoticed."""

    def act(member: RankThread) -> SavedCheckpoint:
        parts = Parts(-1.0 if member.rank == drifted else float(step))
        nn.init.constant_(parts.model.bias, 0.5)
        held = parts.modules(), parts.optimizers()
        health = CheckpointHealth(finite=are_finite(*held) and not (drifted == member.rank and step == 0))
        own = (("model", "weight"),) if member.rank == drifted else ()
        state = RankState(member.rank, ("model",), own, {}, ("model",)).plain() if drifted is not None else None
        run = {"step": step, "digests": digests(*held), "health": health.to_json(), "feed": None, "rank_state": state}
        return storage(path, member).save(step, parts, run)

    return everywhere(ranks, act)[0]  # type: ignore[no-any-return]


def load(ranks: RankThreads, path: Path, steps: list[SavedCheckpoint], parts: list[Parts]) -> list[Any]:
    def act(member: RankThread) -> LoadedCheckpoint:
        training: Any = SimpleNamespace(
            medic=SimpleNamespace(job="llm-1"),
            storage=storage(path, member),
            parts=parts[member.rank],
            verifies=True,
            broken=None,
        )
        return CheckpointLoading(training).load_first(steps, member.share.group("rollback"))

    return everywhere(ranks, act)


def test_each_rank_verifies_what_it_has_loaded(tmp_path: Path) -> None:
    """The answer states for how many ranks the comparison succeeded."""
    with RankThreads(SIZE, every=1) as ranks:
        newest = save(ranks, tmp_path, 10)
        loaded = load(ranks, tmp_path, [newest], [Parts(), Parts()])
    assert [one.verified for one in loaded] == [{"compared": 2, "agreed": 2, "ranks": 2}] * 2


def test_one_flipped_bit_on_one_rank_sends_all_to_an_older_checkpoint(tmp_path: Path) -> None:
    """All ranks load the older checkpoint in full and report what was wrong with the newer one."""
    parts = [Parts(), Parts()]
    parts[1].broken = {20.0}
    with RankThreads(SIZE, every=1) as ranks:
        older, newer = save(ranks, tmp_path, 10), save(ranks, tmp_path, 20)
        loaded = load(ranks, tmp_path, [newer, older], parts)
    assert [one.checkpoint.step for one in loaded] == [10, 10]
    assert [one.unusable for one in loaded] == [
        ["step-00000020 was loaded otherwise than it was saved: rank 1: 1 of 2 tensors are not as they were saved: "
         "model.weight"]
    ] * 2  # fmt: skip
    assert [each.model.weight[0, 0].item() for each in parts] == [10.0, 10.0]


def test_without_an_intact_older_checkpoint_the_job_ends_on_all_ranks(tmp_path: Path) -> None:
    """The rank whose own parameters are right ends as well."""
    parts = [Parts(), Parts()]
    parts[1].broken = {10.0}
    with RankThreads(SIZE, every=1) as ranks:
        raised = load(ranks, tmp_path, [save(ranks, tmp_path, 10)], parts)
    assert [type(one) for one in raised] == [HalfLoaded, HalfLoaded]
    assert all("rank 1: 1 of 2 tensors are not as they were saved" in str(one) for one in raised)


def test_a_rank_that_cannot_load_ends_the_job_on_all_ranks(tmp_path: Path) -> None:
    """No rank waits for it to compare."""
    parts = [Parts(), Parts()]
    parts[1].fails = True
    with RankThreads(SIZE, every=1) as ranks:
        raised = load(ranks, tmp_path, [save(ranks, tmp_path, 10)], parts)
    assert [type(one) for one in raised] == [HalfLoaded, HalfLoaded]
    assert all("(rank 1: RuntimeError: out of memory)" in str(one) for one in raised)


def test_a_rank_that_had_drifted_matches_the_others_again(tmp_path: Path) -> None:
    """The ranks noticed a fault: every rank loads what rank 0 has written, and is compared with that."""
    parts = [Parts(), Parts()]
    with RankThreads(SIZE, every=1) as ranks:
        loaded = load(ranks, tmp_path, [save(ranks, tmp_path, 10, drifted=1)], parts)
    assert [one.verified["agreed"] for one in loaded] == [2, 2]
    assert [each.model.weight[0, 0].item() for each in parts] == [10.0, 10.0]


def test_a_checkpoint_of_rank_0_alone_is_rejected_if_another_rank_differed(tmp_path: Path) -> None:
    """Earlier releases wrote such checkpoints; if all ranks were the same, it is loaded."""

    def rewrite(found: SavedCheckpoint, digest: str) -> None:
        file = found.path / "rank-00001.pt"
        held = torch.load(file)
        del held["run"]["rank_state"]
        held["run"]["digests"]["model.weight"] = digest or held["run"]["digests"]["model.weight"]
        torch.save({**held, "own": {}}, file)
        complete = checkpoints.completion(found.path) or {}
        sizes = {**complete["files"], file.name: file.stat().st_size}
        checkpoints.mark_complete(found.path, {**complete, "files": sizes})

    parts = [Parts(7.0), Parts(7.0)]
    with RankThreads(SIZE, every=1) as ranks:
        same, other = save(ranks, tmp_path, 10), save(ranks, tmp_path, 20)
        rewrite(same, "")
        rewrite(other, "float32/2:0000000000000001")
        loaded = load(ranks, tmp_path, [other, same], parts)
    assert [one.checkpoint.step for one in loaded] == [10, 10]
    assert "rank 1: step-00000020 holds the state of rank 0 alone" in loaded[0].unusable[0]


def test_a_checkpoint_no_rank_can_read_changes_nothing(tmp_path: Path) -> None:
    """The training continues."""
    parts = [Parts(7.0), Parts(7.0)]
    with RankThreads(SIZE, every=1) as ranks:
        newest = save(ranks, tmp_path, 10)
        (newest.path / "training.pt").write_bytes(b"damaged")
        raised = load(ranks, tmp_path, [newest], parts)
    assert [type(one) for one in raised] == [UnusableCheckpoint, UnusableCheckpoint]
    assert [each.model.weight[0, 0].item() for each in parts] == [7.0, 7.0]


def test_non_finite_numbers_on_one_rank_make_the_checkpoint_unhealthy(tmp_path: Path) -> None:
    """Rank 0 writes the health mark for all ranks."""
    with RankThreads(SIZE, every=1) as ranks:
        save(ranks, tmp_path, 0, drifted=1)
        save(ranks, tmp_path, 10)
        healths = {one.step: one.health for one in storage(tmp_path, ranks.members[0]).checkpoints()}
    assert "not all finite" in problem(healths[0])
    assert healths[10] is not None
    assert healths[10].finite is True


def test_compiled_and_uncompiled_models_have_the_same_digests() -> None:
    """A checkpoint of one loads into the other."""
    parts = Parts(1.0)
    compiled = StateParts(model=torch.compile(parts.model, backend="eager"), optimizer=parts.by_name["optimizer"])
    assert digests(parts.modules(), parts.optimizers()) == digests(compiled.modules(), compiled.optimizers())


@pytest.mark.parametrize("change", ["bit", "swap", "missing", "more"])
def test_any_change_is_detected(change: str) -> None:
    """Examples are a flipped bit, two swapped numbers, and a missing or new tensor."""
    parts = Parts(1.0)
    parts.model.weight.data = torch.arange(4.0).view(2, 2)
    before = digests(parts.modules(), parts.optimizers())
    assert compare(before, digests(parts.modules(), parts.optimizers())).problem == ""
    weight = parts.model.weight.data
    if change == "bit":
        weight.view(torch.int32)[1, 1] ^= 1 << 31
    elif change == "swap":
        weight[0, 0], weight[0, 1] = weight[0, 1].item(), weight[0, 0].item()
    elif change == "missing":
        parts.model.register_parameter("bias", None)
    else:
        parts.model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    assert compare(before, digests(parts.modules(), parts.optimizers())).problem != ""


class Shown(torch.optim.Optimizer):
    """A wrapper that shows its inner optimizer's state, and loads in place."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group["lr"] = loaded["lr"]


def test_wrappers_whose_state_cannot_be_set_are_loaded() -> None:
    outer = Shown(Shown(torch.optim.Adam(torch.nn.Linear(2, 1).parameters(), lr=0.1)))
    saved = outer.state_dict()
    outer.param_groups[0]["lr"] = 0.2
    optimizer_states.load_state(outer, saved)
    assert outer.param_groups[0]["lr"] == 0.1
