"""Reports of the ranks when one of them is silent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trainmedic.errors import NotAgreed
from trainmedic.torch.checkpoints.background_saves import BackgroundSaves
from trainmedic.torch.checkpoints.checkpoint_storage import HalfLoaded
from trainmedic.torch.checkpoints.digests import digests
from trainmedic.torch.checkpoints.loading import CheckpointLoading
from trainmedic.torch.rank_agreement import FailedOnSomeRanks, on_all_ranks
from trainmedic.trainer.rollback_proof import RollbackProof


class Ranks:
    """Rank 0 of four. ``others`` report; the rest are silent."""

    rank, world_size = 0, 4

    def __init__(self, others: dict[int, Any]) -> None:
        self.others = others

    def poll(self, value: Any = None, patience: float = 0.0) -> dict[int, Any]:
        return {0: value, **self.others}

    def choose(self, make: Any, patience: float = 0.0) -> Any:
        return make()


def full_disk() -> None:
    raise OSError("no space left")


def test_a_silent_rank_hides_no_reason() -> None:
    with pytest.raises(NotAgreed) as found:
        on_all_ranks(Ranks({1: "no space left", 2: None}), full_disk)
    assert str(found.value) == "rank 3 did not report; rank 0: OSError: no space left; rank 1: no space left"
    with pytest.raises(NotAgreed, match=r"^rank 3 did not report$"):
        on_all_ranks(Ranks({1: None, 2: None}), int)


def test_each_rank_is_named_with_its_own_reason() -> None:
    with pytest.raises(FailedOnSomeRanks) as found:
        on_all_ranks(Ranks({1: "a", 2: "b", 3: "a"}), int)
    assert str(found.value) == "ranks 1, 3: a; rank 2: b"


@pytest.mark.parametrize("report", [["out of memory", None], [None, "1 of 2 tensors are not as they were saved"]])
def test_a_load_that_a_silent_rank_leaves_unknown_says_what_the_others_found(report: list[str | None]) -> None:
    training = SimpleNamespace(medic=SimpleNamespace(job="llm"), broken=None)
    loading = CheckpointLoading(cast(Any, training))
    with pytest.raises(HalfLoaded, match=f"rank 3 did not report; rank 1: {report[0] or report[1]}"):
        loading.confirm_on_all_ranks(Ranks({1: report, 2: [None, None]}), None)


def background_saves(others: dict[int, Any]) -> BackgroundSaves:
    medic = SimpleNamespace(job="llm", rank=0, world_size=4, group=lambda name: Ranks(others))
    return BackgroundSaves(cast(Any, medic), cast(Any, None), cast(Any, SimpleNamespace(pool=None)))


def test_a_background_save_with_a_silent_rank_keeps_its_own_error() -> None:
    saves = background_saves({1: "", 2: ""})
    with pytest.raises(NotAgreed, match=r"rank 3 did not begin .*; rank 0: OSError: no space left"):
        saves.start(5, cast(Any, None), cast(Any, full_disk))


def test_a_rank_without_a_copy_costs_the_checkpoint_on_all_ranks() -> None:
    """A caller that wrote instead would wait for that rank, which goes on training."""
    failed = background_saves({1: "", 2: "", 3: ""})
    with pytest.raises(OSError, match="no space left"):
        failed.start(5, cast(Any, None), cast(Any, full_disk))
    other = background_saves({1: "", 2: "no copy", 3: "no memory"})
    with pytest.raises(NotAgreed, match=r"^rank 2 could not copy the state$"):
        other.start(5, cast(Any, None), lambda: cast(Any, object()))


def test_a_silent_rank_counts_as_not_compared() -> None:
    modules: Any = {"model": torch.nn.Linear(2, 1)}
    medic = SimpleNamespace(world_size=4, job="llm", group=lambda name: Ranks({1: "", 2: ""}))
    proof = RollbackProof(cast(Any, medic), lambda: 1)
    assert proof.check_loaded({"digests": digests(modules, {})}, modules, {}) == ""
    assert "rank 3" in proof._problem
    assert proof._parameters["agreed"] == 0
