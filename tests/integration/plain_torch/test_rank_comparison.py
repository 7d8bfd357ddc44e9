"""Whether the ranks still have the same weights: rank by rank in threads, and under torchrun."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.plain_torch import changing_rank
from tests.support.rank_processes import RankProcesses
from tests.support.rank_threads import RankThreads
from trainmedic.job.progress import Progress
from trainmedic.recovery.checkpoints import completion
from trainmedic.torch.rank_comparison import RankComparison

SAME = {"model.weight": "float32:00000000000000aa"}
OTHER = {"model.weight": "float32:00000000000000ab"}


class Memory:
    """What a rank keeps in memory, as far as it is told to forget."""

    def __init__(self) -> None:
        self.dropped_after: list[int] = []

    def drop_after(self, step: int, until: int) -> None:
        assert until > step
        self.dropped_after.append(step)


class Ranks:
    """Three ranks that train, each with its comparison."""

    def __init__(self, ranks: RankThreads) -> None:
        self.progress = [Progress() for _ in ranks.members]
        self.memory = [Memory() for _ in ranks.members]
        self.comparisons = [
            RankComparison(SimpleNamespace(job="j", rank=rank, world_size=3, progress=progress, group=one.share.group))  # type: ignore[arg-type]
            for rank, (one, progress) in enumerate(zip(ranks.members, self.progress, strict=True))
        ]

    def compare(self, step: int, *digests: Mapping[str, str]) -> list[bool | None]:
        """What it says on each rank, of the state of that step."""

        def run(rank: int) -> None:
            self.progress[rank].steps = step
            memory: Any = self.memory[rank]
            self.comparisons[rank].compare(step, digests[rank], memory)

        threads = [threading.Thread(daemon=True, target=run, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [comparison.agree for comparison in self.comparisons]


def test_a_rank_whose_weights_changed_by_themselves_is_found_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """All ranks name it; memory checkpoints since they agreed are dropped, because they may have the change."""
    with RankThreads(3, every=1) as threads:
        ranks = Ranks(threads)
        assert ranks.compare(10, SAME, SAME, SAME) == [True] * 3
        assert ranks.compare(20, SAME, OTHER, SAME) == [False] * 3
    assert [progress.ranks_differing for progress in ranks.progress] == [1] * 3
    assert [memory.dropped_after for memory in ranks.memory] == [[10]] * 3
    assert "at step 20 the weights of rank 1 differ from the other ranks'; at step 10 they were equal" in caplog.text


def test_a_rollback_ends_the_difference_until_the_next_comparison() -> None:
    """All ranks have loaded the same; the next checkpoint shows whether they still have it."""
    with RankThreads(3, every=1) as threads:
        ranks = Ranks(threads)
        ranks.compare(10, SAME, SAME, SAME)
        ranks.compare(20, OTHER, SAME, SAME)
        for comparison in ranks.comparisons:
            comparison.reset_after_rollback()
        assert [comparison.agree for comparison in ranks.comparisons] == [None] * 3
        assert [progress.ranks_differing for progress in ranks.progress] == [0] * 3
        # The same step again, with other weights.
        assert ranks.compare(20, SAME, SAME, SAME) == [True] * 3


def test_losses_are_untrusted_from_the_first_step_with_possibly_wrong_weights() -> None:
    """A rank in the majority has one more loss from right weights than the rank that changed."""
    with RankThreads(3, every=1) as threads:
        ranks = Ranks(threads)
        ranks.compare(10, SAME, SAME, SAME)
        assert [comparison.trouble_at for comparison in ranks.comparisons] == [None] * 3
        ranks.compare(20, SAME, OTHER, SAME)
        assert [comparison.trouble_at for comparison in ranks.comparisons] == [12, 11, 12]
        for comparison in ranks.comparisons:
            comparison.reset_after_rollback()
        assert [comparison.trouble_at for comparison in ranks.comparisons] == [None] * 3


def test_ranks_that_never_agreed_after_a_step_are_left_alone() -> None:
    """Processors of different kinds compute differently, and before the first step no rank has computed anything."""
    with RankThreads(3, every=1) as threads:
        ranks = Ranks(threads)
        ranks.compare(0, SAME, SAME, SAME)
        ranks.compare(10, SAME, OTHER, SAME)
    assert [progress.ranks_differing for progress in ranks.progress] == [0] * 3
    assert [memory.dropped_after for memory in ranks.memory] == [[]] * 3


def both(model: Mapping[str, str], moment: str) -> Mapping[str, str]:
    return {**model, "optimizer.0.momentum": f"float32:{moment:0>16}"}


def test_an_optimizer_that_differs_on_purpose_hides_no_weight_change() -> None:
    """Each part is judged separately: momentum of its owner alone is no fault; the weights are still watched."""
    with RankThreads(3, every=1) as threads:
        ranks = Ranks(threads)
        assert ranks.compare(10, *(both(SAME, moment) for moment in "abc")) == [True] * 3
        assert [progress.ranks_differing for progress in ranks.progress] == [0] * 3
        assert ranks.compare(20, both(SAME, "a"), both(OTHER, "b"), both(SAME, "c")) == [False] * 3
        assert [(one.is_faulty("model"), one.is_faulty("optimizer")) for one in ranks.comparisons] == [
            (True, False)
        ] * 3


def test_ranks_that_agree_again_by_themselves_differ_on_purpose() -> None:
    """Weights may be averaged every few steps. After that, a difference is no longer a fault."""
    with RankThreads(3, every=1) as threads:
        ranks = Ranks(threads)
        ranks.compare(10, SAME, SAME, SAME)
        ranks.compare(20, SAME, OTHER, OTHER)
        assert ranks.compare(30, SAME, SAME, SAME) != [False] * 3
        assert ranks.compare(40, SAME, OTHER, OTHER) != [False] * 3
    assert [progress.ranks_differing for progress in ranks.progress] == [0] * 3


@pytest.mark.long
def test_a_job_resumes_where_its_ranks_had_the_same_weights(tmp_path: Path, redis_url: str) -> None:
    """A bit flipped on one rank between two checkpoints: the later one is unhealthy, and memory has none newer."""
    processes = RankProcesses(tmp_path, redis_url)
    try:
        for attempt in ("first", "second"):
            processes.torchrun(3, changing_rank.__file__, attempt).wait(120)
    finally:
        processes.end()
    marks = {path.name: completion(path) or {} for path in sorted((tmp_path / "saved").glob("step-*"))}
    # Those of step 15 and later were written by the second attempt.
    assert {name: mark["health"]["ranks_agree"] for name, mark in marks.items()} == {
        f"step-{step:08d}": True for step in range(0, changing_rank.STEPS + 1, 5)
    }, processes.log()
    said = "at step 15 the weights of rank 1 differ from the other ranks'; at step 10 they were equal"
    assert said in (tmp_path / "job-0.log").read_text()
    for rank in range(3):
        resumed = [json.loads(line) for line in (tmp_path / f"resumed-{rank}.jsonl").read_text().splitlines()]
        assert resumed == [None, 10]
