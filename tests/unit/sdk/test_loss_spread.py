"""The losses of a job's ranks in short: the same size for two ranks and for ten thousand."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from trainmedic.job.loss_spread import loss_spread, rank_spans


def figures(*losses: Any, step: int = 40) -> dict[int, dict[str, Any]]:
    return {rank: {"loss": loss, "loss_step": step, "node": f"n{rank // 8}"} for rank, loss in enumerate(losses)}


def test_the_extremes_the_median_and_all_of_few_ranks_are_named() -> None:
    """With the steps that they are of."""
    ranks = figures(2.5, 2.0, 3.0)
    ranks[1]["loss_step"] = 38
    assert loss_spread(ranks) == {
        "ranks": 3,
        "steps": [38, 40],
        "lowest": {"rank": 1, "node": "n0", "loss": 2.0},
        "median": 2.5,
        "highest": {"rank": 2, "node": "n0", "loss": 3.0},
        "curve": [2.0, 2.5, 3.0],
        "apart": [],
        "apart_count": 0,
    }


def test_ten_thousand_ranks_take_no_more_room() -> None:
    """Those that differ are named, and those that are no number."""
    chance = random.Random(7)
    ranks = figures(*(chance.gauss(2.3, 0.05) for _ in range(10_000)))
    for rank in (17, 4000, 9999):
        ranks[rank]["loss"] = 6.0 + rank / 10_000
    for rank in range(100, 132):
        ranks[rank]["loss"] = math.nan
    ranks[5]["loss"], ranks[6]["loss"] = math.inf, -math.inf
    spread = loss_spread(ranks)
    assert spread is not None
    assert [entry["rank"] for entry in spread["apart"]] == [9999, 4000, 17]
    assert spread["nan"] == {"count": 32, "ranks": "100-131"}
    assert (spread["inf"], spread["-inf"]) == ({"count": 1, "ranks": "5"}, {"count": 1, "ranks": "6"})
    assert spread["curve"] == sorted(spread["curve"])
    assert (spread["curve"][0], spread["curve"][-1]) == (spread["lowest"]["loss"], spread["highest"]["loss"])
    assert len(json.dumps(spread, allow_nan=False)) < 3000


def test_ranks_that_report_one_mean_do_not_differ_by_rounding() -> None:
    """And of three ranks none is the odd one."""
    spread = loss_spread(figures(*[2.0] * 6, 2.0000001, 2.0001))
    assert spread is not None
    assert spread["apart_count"] == 0
    assert (loss_spread(figures(1.0, 1.0, 9.0)) or {})["apart"] == []
    assert (loss_spread(figures(1.0, 1.0, 1.0, 9.0)) or {})["apart"] == [{"rank": 3, "node": "n0", "loss": 9.0}]


def test_where_no_rank_has_a_number_the_kinds_are_all_that_is_said() -> None:
    """There is no median of them."""
    assert loss_spread(figures(math.nan, math.nan)) == {
        "ranks": 2,
        "steps": [40, 40],
        "nan": {"count": 2, "ranks": "0-1"},
    }


@pytest.mark.parametrize("ranks", [{}, {0: {"node": "n"}}, {0: {"loss": "low"}, 1: {"loss": True}, 2: {"loss": None}}])
def test_a_job_that_reports_no_loss_has_no_spread(ranks: dict[int, dict[str, Any]]) -> None:
    """Another version of the SDK may send anything."""
    assert loss_spread(ranks) is None


def test_many_spans_are_cut() -> None:
    """Each second of a thousand ranks."""
    assert rank_spans([3, 0, 1, 2, 7]) == "0-3, 7"
    assert rank_spans(range(0, 1000, 2)).endswith(", 38 and 480 more")
