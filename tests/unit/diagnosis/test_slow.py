"""What a slow job loses its time with."""

from __future__ import annotations

import pytest

from trainmedic_logs.diagnosis import slow
from trainmedic_logs.diagnosis.slow import RankStep
from trainmedic_logs.diagnosis.verdict import Confidence
from trainmedic_logs.domain.finding import CauseClass


def alike(
    data: float, compute: float, wait: float, ranks: int = 8, memory_ratio: float | None = None
) -> dict[int, RankStep]:
    """Ranks whose steps divide alike."""
    return {rank: RankStep(data, compute, wait, memory_ratio) for rank in range(ranks)}


def test_all_ranks_wait_for_their_batches() -> None:
    """The loader is too slow, and no rank is to blame for it."""
    verdict = slow.diagnose(alike(0.5, 0.45, 0.05))
    assert (verdict.cause, verdict.ranks, verdict.confidence) == (CauseClass.DATA, (), Confidence.MEDIUM)
    assert verdict.shares == {"data": 0.5, "compute": 0.45, "wait": 0.05}


def test_one_rank_computes_longer_and_the_others_wait_for_it() -> None:
    """Its own time is 1.6 times the median, and explains the waiting of the others."""
    parts = alike(0.02, 0.58, 0.4) | {5: RankStep(0.02, 0.96, 0.02, node="node-1")}
    verdict = slow.diagnose(parts)
    assert (verdict.cause, verdict.ranks, verdict.node) == (CauseClass.NODE, (5,), None)


def test_the_loader_of_one_rank_is_slow() -> None:
    """The numbers are the same, but the time goes into its batches: the data, not the node."""
    verdict = slow.diagnose(alike(0.02, 0.58, 0.4) | {5: RankStep(0.4, 0.58, 0.02)})
    assert (verdict.cause, verdict.ranks) == (CauseClass.DATA, (5,))


def test_all_ranks_wait_alike_and_none_is_slower() -> None:
    """The cause is the network then."""
    assert slow.diagnose(alike(0.01, 0.5, 0.49)).cause is CauseClass.NETWORK


def test_a_slow_rank_that_explains_half_of_the_waiting_is_not_the_cause() -> None:
    """One cause is named only where it explains four fifths of the loss; else the shares are stated."""
    verdict = slow.diagnose(alike(0.0, 0.4, 0.6) | {2: RankStep(0.0, 0.7, 0.3)})
    assert (verdict.cause, verdict.ranks, verdict.confidence) == (CauseClass.UNKNOWN, (), Confidence.LOW)
    assert verdict.shares is not None
    assert "60% wait" in verdict.summary


def test_data_and_waiting_together_have_no_single_cause() -> None:
    """Each takes a third."""
    assert slow.diagnose(alike(0.33, 0.34, 0.33)).cause is CauseClass.UNKNOWN


def test_full_gpus_are_a_hint_where_nothing_else_is_slow() -> None:
    """They are no hint where the ranks wait for something."""
    verdict = slow.diagnose(alike(0.02, 0.9, 0.08, memory_ratio=0.97))
    assert (verdict.cause, verdict.confidence) == (CauseClass.GPU_MEMORY, Confidence.LOW)
    assert slow.diagnose(alike(0.5, 0.45, 0.05, memory_ratio=0.97)).cause is CauseClass.DATA


@pytest.mark.parametrize("parts", [{}, alike(0.0, 0.0, 0.0), alike(0.02, 0.9, 0.08)])
def test_nothing_is_named_without_a_loss(parts: dict[int, RankStep]) -> None:
    """Nothing is known, there is no time at all, or the job just computes."""
    assert slow.diagnose(parts).cause is CauseClass.UNKNOWN


def test_a_job_at_its_usual_speed_gets_no_hint() -> None:
    """It may always have waited for its data."""
    assert slow.diagnose(alike(0.5, 0.45, 0.05), baseline_s=1.0).cause is CauseClass.UNKNOWN
    assert slow.diagnose(alike(0.5, 0.45, 0.05), baseline_s=0.5).cause is CauseClass.DATA


def test_a_single_rank_waits_for_no_other() -> None:
    """What it reports as waiting is not explained by a rank or the network."""
    assert slow.diagnose({0: RankStep(0.0, 0.5, 0.5)}).cause is CauseClass.UNKNOWN
