"""Trainings whose optimizer has another state on each rank: two ranks over gloo go back, resume, and prove it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.integration.plain_torch.own_optimizers import KINDS
from tests.integration.plain_torch.rank_states_training import BREAKS, LAST, RESUMED
from tests.support.rank_processes import RankProcesses

RANKS = 2
PROGRAM = "tests.integration.plain_torch.rank_states_training"


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, shared_redis: Any) -> RankProcesses:
    """One start of the ranks for all kinds and all breaks."""
    job = RankProcesses(tmp_path_factory.mktemp("ranks"), shared_redis.url)
    try:
        code = job.torchrun(RANKS, "-m", PROGRAM, *KINDS).wait(480)
    finally:
        job.end()
    assert code == 0, job.log()
    return job


def written(job: RankProcesses, kind: str) -> list[dict[str, Any]]:
    return [torch.load(job.directory / f"{kind}-{rank}.pt", weights_only=False) for rank in range(RANKS)]


def are_same(states: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(states) == len(other) and all(torch.equal(*pair) for pair in zip(states, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_restores_its_own_state(kind: str, lived: RankProcesses) -> None:
    """It comes from disk, memory or a resume, to the bit; the answers say how much each rank compared."""
    results = written(lived, kind)
    assert not are_same(results[0]["calm"][LAST], results[1]["calm"][LAST])
    for rank in range(RANKS):
        calm = results[rank]["calm"]
        for step, state in results[rank]["ordered"].items():
            assert are_same(state, calm[step]), f"rank {rank}, step {step}"
        assert results[rank]["back"] == LAST
        assert sorted(results[rank]["resumed"]) == list(range(LAST + 1, RESUMED + 1))
        if kind == "compressed":  # its error is by bucket, and DDP lays these out anew: it begins again, and says so
            assert "model.comm_hook.0 starts afresh" in (lived.directory / "job-0.log").read_text()
            continue
        for step, state in results[rank]["resumed"].items():
            assert are_same(state, calm[step]), f"rank {rank}, resumed, step {step}"
    answers = results[0]["answers"]
    assert [[each["status"] for each in answer.values()] for answer in answers] == [["applied"] * RANKS] * 2
    assert [answer[0]["step"] for answer in answers] == [4, 6]
    for answer in answers:
        for each in answer.values():
            compared = each["verified"]["parameters"]
            assert compared["compared"] == compared["agreed"] >= 4
            assert compared["ranks"] == RANKS


def test_shards_of_zero_are_merged_for_another_number_of_ranks(lived: RankProcesses) -> None:
    """One rank loads what two have written, with the moments of all parameters from their owners."""
    results = torch.load(lived.directory / "zero-alone.pt", weights_only=False)
    assert (results["step"], results["problem"]) == (RESUMED, "")
    apart = [written(lived, "zero")[rank]["resumed"][RESUMED][1:] for rank in range(RANKS)]
    moments = [tensor for states in apart for tensor in states[4:-2]]
    assert len(results["states"]) == 4 + len(moments) + 2
    for tensor in moments:
        assert any(torch.equal(tensor, states) for states in results["states"][4:-2])


def test_plain_tensors_of_fsdp_ranks_do_not_load_on_another_number_of_ranks(lived: RankProcesses) -> None:
    """One rank is refused what two have written, and the reason is given."""
    refused = torch.load(lived.directory / "zero-alone.pt", weights_only=False)["refused"]
    assert refused.startswith("what optimizers keep in attributes in step-00000020 belongs to each of its 2 ranks")
    assert refused.endswith("start 2 ranks")


@pytest.mark.parametrize("which", BREAKS)
def test_a_broken_verification_is_detected(which: str, lived: RankProcesses) -> None:
    """Loading another rank's state is never an applied rollback; another checkpoint is used, or the job ends."""
    ends = [json.loads((lived.directory / f"breaks-{rank}.json").read_text())[which] for rank in range(RANKS)]
    answers = ends[0]["answers"]
    assert len(answers) == RANKS
    assert "applied 8" not in answers
    # The state of step 0 is the same on all ranks, so that going back there may well be right.
    assert all(end["ended"].startswith("HalfLoaded") for end in ends) or set(answers) == {"applied 0"}, ends
