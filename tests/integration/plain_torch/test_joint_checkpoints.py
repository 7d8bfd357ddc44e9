"""Checkpoints of several ranks, rank by rank in threads over PyTorch's own store in memory: what each file is for."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.rank_threads import RankThread, RankThreads, everywhere
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.checkpoints.checkpoint_storage import HalfLoaded, UnusableCheckpoint
from trainmedic.torch.checkpoints.digests import KnownDigests, digests_of
from trainmedic.torch.checkpoints.joint_checkpoints import (
    JointCheckpointDirectory,
    JointOwnCheckpoints,
)
from trainmedic.torch.checkpoints.own_checkpoints import OwnCheckpoints
from trainmedic.torch.checkpoints.rank_states import RankState, compare_states
from trainmedic.torch.checkpoints.replicated_contents import ReplicatedContents
from trainmedic.torch.checkpoints.state_digests import compare_with, tensors_of_parts
from trainmedic.torch.rank_agreement import FailedOnSomeRanks
from trainmedic.torch.state_parts import StateParts


def parts(value: float = 0.0) -> StateParts:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return StateParts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def state(rank: int, **more: Any) -> dict[str, Any]:
    return {"step": 10, "random": rank, "feed": {"epoch": 1, "place": 12, "left_out": [[1, 3, 6]]}, **more}


def directory(path: Path, member: RankThread) -> JointCheckpointDirectory:
    return JointCheckpointDirectory(path, 3, member, ReplicatedContents(member.rank))


def saved(ranks: RankThreads, path: Path) -> SavedCheckpoint:
    found = everywhere(ranks, lambda one: directory(path, one).save(10, parts(1.0), state(one.rank)))
    assert found[0] == found[1]
    checkpoint: SavedCheckpoint = found[0]
    return checkpoint


def test_a_checkpoint_holds_the_training_once_and_the_state_of_each_rank(tmp_path: Path) -> None:
    """Every rank restores its own state, and all of them restore the training."""
    with RankThreads(2, every=1) as ranks:
        found = saved(ranks, tmp_path)
        held = [parts() for _ in range(2)]
        runs = everywhere(ranks, lambda one: directory(tmp_path, one).load(found, held[one.rank]))
    assert [run["random"] for run in runs] == [0, 1]
    assert all(bool((one.by_name["model"].weight == 1.0).all()) for one in held)
    names = sorted(path.name for path in found.path.iterdir())
    assert names == [".trainmedic-complete", "rank-00000.pt", "rank-00001.pt", "training.pt"]


def test_each_rank_restores_its_own_buffers(tmp_path: Path) -> None:
    """DDP leaves each rank the buffers of the last batch that the rank itself processed."""

    def normalized(mean: float) -> StateParts:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        nn.init.constant_(model[0].weight, 0.5)
        model.register_buffer("derived", torch.full((1,), mean), persistent=False)
        model[1].running_mean.fill_(mean)
        return StateParts(model=model, shadow=nn.BatchNorm1d(2))

    means = [1.0, 2.0]
    with RankThreads(2, every=1) as ranks:
        act = lambda one: directory(tmp_path, one).save(10, normalized(means[one.rank]), state(one.rank))  # noqa: E731
        found = everywhere(ranks, act)[0]
        held = [normalized(0.0) for _ in means]
        everywhere(ranks, lambda one: directory(tmp_path, one).load(found, held[one.rank]))
    models = [one.by_name["model"] for one in held]
    assert [one[1].running_mean.tolist() for one in models] == [[1.0, 1.0], [2.0, 2.0]]
    assert [one.derived.item() for one in models] == [0.0, 0.0]
    assert all(torch.equal(models[0][0].weight, one[0].weight) for one in models)


def test_a_write_failure_on_one_rank_discards_the_checkpoint(tmp_path: Path) -> None:
    """All ranks learn the reason, and no files are left behind."""
    with RankThreads(2, every=1) as ranks:
        unwritable = [state(0), state(1, what=lambda: None)]
        act = lambda one: directory(tmp_path, one).save(10, parts(), unwritable[one.rank])  # noqa: E731
        raised = everywhere(ranks, act)
        assert [type(one) for one in raised] == [FailedOnSomeRanks, FailedOnSomeRanks]
        assert all(str(one).startswith("rank 1: ") for one in raised)
        assert list(tmp_path.iterdir()) == []
        assert directory(tmp_path, ranks.members[0]).checkpoints() == []


def test_ranks_that_do_not_share_their_directory_are_reported(tmp_path: Path) -> None:
    """A checkpoint that rank 0 does not see in full does not count."""
    with RankThreads(2, every=1) as ranks:
        act = lambda one: directory(tmp_path / f"node-{one.rank}", one).save(10, parts(), state(one.rank))  # noqa: E731
        raised = everywhere(ranks, act)
    assert "a directory that all ranks share" in str(raised[0])
    assert "a directory that all ranks share" in str(raised[1])
    assert not list(tmp_path.rglob(checkpoints.COMPLETE))


def test_a_checkpoint_unreadable_on_one_rank_is_loaded_by_none(tmp_path: Path) -> None:
    """No rank is changed, so that an older checkpoint can be tried."""
    with RankThreads(2, every=1) as ranks:
        found = saved(ranks, tmp_path)
        (found.path / "rank-00001.pt").write_bytes(b"damaged")
        held = [parts() for _ in range(2)]
        raised = everywhere(ranks, lambda one: directory(tmp_path, one).load(found, held[one.rank]))
    assert [type(one) for one in raised] == [UnusableCheckpoint, UnusableCheckpoint]
    assert all("rank 1: step-00000010/rank-00001.pt cannot be read" in str(one) for one in raised)
    assert all(bool((one.by_name["model"].weight == 0.0).all()) for one in held)


def test_another_number_of_ranks_resumes_at_the_common_position(tmp_path: Path) -> None:
    """This is the position in the data; the random numbers match no earlier rank's."""
    with RankThreads(2, every=1) as ranks:
        found = saved(ranks, tmp_path)
    with RankThreads(3, every=1) as ranks:
        runs = everywhere(ranks, lambda one: directory(tmp_path, one).load(found, parts()))
    for run in runs:
        assert run["random"] is None
        assert run["feed"] == {"epoch": 1, "place": 8, "left_out": [[1, 2, 4]]}


def test_user_functions_are_called_on_every_rank(tmp_path: Path) -> None:
    """All ranks learn of a failed save. After a failed load the state is unknown."""
    calls: list[tuple[str, int]] = []

    def storage(one: RankThread) -> JointOwnCheckpoints:
        def save(step: int, state: Any) -> Path:
            calls.append(("save", one.rank))
            if step == 20 and one.rank == 1:
                raise OSError("the disk is full")
            return tmp_path / f"{step}"

        def load(found: SavedCheckpoint) -> None:
            raise OSError("stale handle")

        return JointOwnCheckpoints(OwnCheckpoints(save, load, list), one)

    with RankThreads(2, every=1) as ranks:
        storages = [storage(one) for one in ranks.members]
        first = everywhere(ranks, lambda one: storages[one.rank].save(10, parts(), {}))
        second = everywhere(ranks, lambda one: storages[one.rank].save(20, parts(), {}))
        assert [one.step for one in first] == [10, 10]
        assert [str(one) for one in second] == ["rank 1: OSError: the disk is full"] * 2
        assert sorted(calls) == [("save", 0), ("save", 0), ("save", 1), ("save", 1)]
        with pytest.raises(HalfLoaded, match="stale handle"):
            storages[0].load(first[0], parts())


@pytest.mark.parametrize("differing", [(), ("optimizer",)])
def test_user_functions_that_give_a_rank_the_state_of_another_end_the_job(differing: tuple[str, ...]) -> None:
    """This applies if the state differs by rank; otherwise the state of rank 0 is right on each."""
    run = {"rank_state": RankState(0, differing, (), {}).plain()}
    found = SavedCheckpoint(10, datetime.now(UTC), "anywhere")
    with RankThreads(2, every=1) as ranks:
        own = OwnCheckpoints(lambda step, state: "anywhere", lambda found: run, lambda: [found])
        act = lambda one: JointOwnCheckpoints(own, one).load(found, parts())  # noqa: E731
        loaded = everywhere(ranks, act)
    assert loaded[0] == run
    if differing:
        assert isinstance(loaded[1], HalfLoaded)
        assert "rank 1 was given the state of rank 0, but optimizer differs by rank" in str(loaded[1])
    else:
        assert loaded[1] == run


def with_momentum(rank: int, numbers: list[int], value: float = 1.0) -> StateParts:
    """A training whose optimizer has momentum of the parameters of these numbers."""
    made = parts(1.0)
    nn.init.constant_(made.by_name["model"].bias, 0.5)
    optimizer = made.by_name["optimizer"]
    for number in numbers:
        parameter = optimizer.param_groups[0]["params"][number]
        optimizer.state[parameter] = {"momentum": torch.full_like(parameter, value + number)}
    return made


@pytest.mark.parametrize("case", ["owned", "own"])
def test_another_number_of_ranks_merges_the_state_of_each_rank(case: str, tmp_path: Path) -> None:
    """Momentum that one rank holds is given to all; all ranks reject two momenta of one parameter."""
    numbers = [[0], [1]] if case == "owned" else [[0, 1], [0, 1]]
    with RankThreads(2, every=1) as ranks:

        def act(one: RankThread) -> SavedCheckpoint:
            held = with_momentum(one.rank, numbers[one.rank], 1.0 + 10 * one.rank)
            known = KnownDigests()
            differing = compare_states(held.capture(), one.share.group("compare"), known)
            assert differing is not None
            run = state(one.rank, digests=digests_of(tensors_of_parts(held), known), rank_state=differing.plain())
            return directory(tmp_path, one).save(10, held, run)

        found = everywhere(ranks, act)[0]
    assert isinstance(found, SavedCheckpoint), found
    held = [with_momentum(rank, []) for rank in range(3)]
    with RankThreads(3, every=1) as ranks:
        runs = everywhere(ranks, lambda one: directory(tmp_path, one).load(found, held[one.rank]))
    if case == "own":
        assert [type(run) for run in runs] == [UnusableCheckpoint] * 3
        reason = (
            "the state of optimizer in step-00000010 belongs to each of its 2 ranks, so that another number of ranks "
            "cannot continue with it: start 2 ranks"
        )
        assert all(reason in str(run) for run in runs)
        return
    for run, one in zip(runs, held, strict=True):
        momenta = [values["momentum"].mean().item() for values in one.by_name["optimizer"].state.values()]
        assert sorted(momenta) == [1.0, 12.0]
        assert compare_with(run["digests"], one).problem == ""
        assert len(run["digests"]) == 4
