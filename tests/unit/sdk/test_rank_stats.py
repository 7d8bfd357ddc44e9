"""What a job shows of its ranks' figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainmedic.job.metrics import HELP
from trainmedic.job.progress import Progress
from trainmedic.job.rank_stats import RankStats, prometheus_samples


def samples(ranks: dict[int, dict[str, Any]]) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for sample in prometheus_samples(ranks)}


def test_the_fullest_rank_speaks_for_the_job() -> None:
    """The one that runs out first, by its own limit."""
    found = samples({0: {"cuda_used": 70, "cuda_limit": 80}, 1: {"cuda_used": 60, "cuda_limit": 61}})
    assert found["training_memory_used_bytes", "cuda"] == 60
    assert found["training_memory_limit_bytes", "cuda"] == 61
    assert found["training_memory_rank", "cuda"] == 1


def test_the_fastest_growth_of_any_rank_is_shown() -> None:
    """Also of a rank that has much memory left."""
    assert (
        samples({0: {"host_growth": 5.0}, 1: {"host_growth": 9.0}})["training_memory_growth_bytes_per_step", "host"]
        == 9
    )


def test_only_the_slowest_ranks_have_series() -> None:
    """Three of a thousand, with the node of each; and what all of them are held against."""
    ranks = {rank: {"own_seconds": 1.0 + rank / 10_000, "node": f"node-{rank // 8}"} for rank in range(1000)}
    ranks[77]["own_seconds"] = 2.0
    found = samples(ranks)
    assert [key for key in found if key[0] == "training_rank_own_seconds"] == [
        ("training_rank_own_seconds", "77", "node-9"),
        ("training_rank_own_seconds", "999", "node-124"),
        ("training_rank_own_seconds", "998", "node-124"),
    ]
    assert found["training_own_median_seconds",] == pytest.approx(1.05, abs=0.001)


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    """With the mean of both no rank could be far from it."""
    found = samples({0: {"own_seconds": 1.0}, 1: {"own_seconds": 3.0}})
    assert found["training_own_median_seconds",] == 1.0


@pytest.mark.parametrize("value", ["much", None, True, float("nan"), {"a": 1}])
def test_what_is_no_number_is_left_out(value: Any) -> None:
    """The figures of another rank come over the network."""
    assert samples({3: {"own_seconds": value, "cuda_used": value, "cuda_limit": value}}) == {("training_ranks",): 1}


def test_a_rank_measures_itself() -> None:
    """Memory where the system tells it, its own time where it was reported, and where it runs."""
    progress = Progress(0.0)
    for step in range(3):
        progress.add_report(step, 1.0, None, None, None, float(step), memory_bytes=5e9, own_seconds=0.5)
    figures = RankStats(progress, "node-7").measure(3.0)
    assert (figures["node"], figures["step"], figures["own_seconds"], figures["device_used"]) == ("node-7", 2, 0.5, 5e9)
    assert figures["resident"] > 0


def test_every_metric_is_in_the_reference() -> None:
    """By its name, in the page's table."""
    page = (Path(__file__).parents[3] / "docs/reference/sdk.md").read_text()
    assert [name for name in HELP if f"`{name}`" not in page] == []
