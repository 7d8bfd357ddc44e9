"""Ranks that called different collectives, or did not come, are named from what the watchdogs print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.diagnosis.test_folder import diagnosed
from trainmedic_logs.diagnosis.verdict import Verdict
from trainmedic_logs.domain.finding import CauseClass

WAIT = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:632] [{group}Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600010 "
    "milliseconds before timing out."
)


def wait(rank: int, number: int, operation: str = "ALLREDUCE", size: int = 1, group: str = "PG ID 0 ") -> str:
    """What the watchdog of a rank prints."""
    return WAIT.format(rank=rank, number=number, operation=operation, size=size, group=group)


def verdict(directory: Path, *lines: str) -> Verdict:
    """The verdict on a log with these lines."""
    (directory / "train.log").write_text("".join(f"{line}\n" for line in lines))
    return diagnosed(directory).attempts[-1].verdict


def test_the_rank_with_another_operation_is_named(tmp_path: Path) -> None:
    """It is one of three in one group, under one number."""
    made = verdict(tmp_path, wait(0, 70), wait(1, 70), wait(2, 70, "BROADCAST"))
    assert (made.cause, made.confidence, made.ranks) == (CauseClass.CODE, "high", (2,))


def test_another_size_is_another_collective(tmp_path: Path) -> None:
    """Number and operation are the same, and one rank has more elements."""
    made = verdict(tmp_path, wait(0, 70), wait(1, 70, size=4096), wait(2, 70))
    assert (made.cause, made.ranks) == (CauseClass.CODE, (1,))


def test_two_differing_ranks_are_both_named(tmp_path: Path) -> None:
    """Nothing shows which one is right; without the group's name the confidence is not high."""
    made = verdict(tmp_path, wait(1, 313, "_ALLGATHER_BASE", 4096, group=""), wait(0, 315, group=""))
    assert (made.cause, made.confidence, made.ranks) == (CauseClass.CODE, "medium", (0, 1))


@pytest.mark.parametrize(
    "waits",
    [
        [wait(0, 70), wait(1, 70), wait(2, 70)],
        # Who is one ahead waits in the next one of the same kind.
        [wait(0, 71), wait(1, 70)],
        # Two groups have numbers, and collectives, of their own.
        [wait(0, 70, group="PG ID 0 "), wait(1, 912, "BROADCAST", group="PG ID 3 ")],
    ],
)
def test_ranks_that_wait_alike_blame_no_rank(waits: list[str], tmp_path: Path) -> None:
    """The case is a hang, and its victims."""
    assert verdict(tmp_path, *waits).cause is CauseClass.HANG


def test_the_rank_that_did_not_join_is_named(tmp_path: Path) -> None:
    """The watchdog's report names it, which has compared all ranks."""
    report = "\t   - [3] finished collective #729, but didn't join collective #730 (count from 1)"
    made = verdict(tmp_path, wait(0, 730), wait(1, 730), report)
    assert (made.cause, made.ranks) == (CauseClass.HANG, (3,))
