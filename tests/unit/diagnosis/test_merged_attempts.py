"""Several attempts in one log: the newest is judged, and the earlier ones are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.diagnosis.test_folder import RAISED, diagnosed
from trainmedic_logs.diagnosis.merged_attempts import beginnings
from trainmedic_logs.domain.finding import CauseClass

BANNER = (
    "W0121 04:41:40.065000 26021 site-packages/torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment "
    "variable for each process to be 1 in default, to avoid your system being overloaded"
)
OOM = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB."
STEP = " iteration {0}/ 500000 | consumed samples: 2048 | lm loss: 2.1E+00 |"
RAISES = [f"[rank1]: {line}" for line in RAISED.splitlines()]


def table(rank: int) -> list[str]:
    """What torchrun prints at its end."""
    return [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2025-01-21_04:41:50",
        "  host      : node-1",
        f"  rank      : {rank} (local_rank: {rank})",
        "  exitcode  : 1 (pid: 2631)",
    ]


def in_one_file(directory: Path, *attempts: list[str]) -> Path:
    (directory / "slurm-77.out").write_text("".join(f"{line}\n" for attempt in attempts for line in attempt))
    return directory


def test_the_newest_attempt_is_judged(tmp_path: Path) -> None:
    """The first has a full card, the second a bug, which fails before a step would prove that it continued."""
    first = [BANNER, STEP.format(10), OOM, *table(2)]
    found = diagnosed(in_one_file(tmp_path, first, [BANNER, *RAISES, *table(1)]))
    assert [(each.attempt, each.verdict.cause, each.verdict.ranks) for each in found.attempts] == [
        (1, CauseClass.GPU_MEMORY, (2,)),
        (2, CauseClass.CODE, (1,)),
    ]
    assert found.attempts[-1].verdict.same_before == 0
    assert not found.attempts[-1].verdict.against


def test_repeated_failures_are_counted(tmp_path: Path) -> None:
    """One file has the same bug three times. A verdict below high confidence does not advise to stop."""
    found = diagnosed(in_one_file(tmp_path, *[[BANNER, *RAISES, *table(1)]] * 3))
    assert [each.verdict.same_before for each in found.attempts] == [0, 1, 2]
    assert (found.attempts[-1].verdict.confidence, found.attempts[-1].verdict.advice) == ("medium", "ask")


def test_a_repeated_bug_is_a_reason_to_stop_where_all_ranks_were_read(tmp_path: Path) -> None:
    """Then nothing else can have been first."""
    found = diagnosed(in_one_file(tmp_path, *[[BANNER, "[rank0]: loading", *RAISES, *table(1)]] * 3))
    assert (found.attempts[-1].verdict.confidence, found.attempts[-1].verdict.advice) == ("high", "stop")


def test_only_the_newest_of_many_attempts_are_read(tmp_path: Path) -> None:
    """A job failed all night, in the loop of a script."""
    found = diagnosed(in_one_file(tmp_path, *[[BANNER, *RAISES, *table(1)]] * 30))
    assert [each.attempt for each in found.attempts] == list(range(23, 31))


@pytest.mark.parametrize(
    ("lines", "begins"),
    [
        # The launchers of two nodes, which start together, and fail together.
        ([BANNER, BANNER, STEP.format(1), *table(1), *table(9)], []),
        ([BANNER, *table(1), *table(9), BANNER, BANNER], [15]),
        # torchrun starts its processes again by itself, and says so twice.
        ([STEP.format(9), "[default] Worker group FAILED. 2/3 attempts left; will restart worker group",
          "  restart_count=1", STEP.format(5)], [1]),
        (["ChildFailedError", "[default] Restarting worker group"], [1]),
        # The records tell.
        (['{"attempt": 1, "step": 5}', '{"attempt": 2, "step": 6}', '{"attempt": 2, "step": 7}'], [1]),
        # After a failure the steps go back to the checkpoint; those of a node that was not told yet do not.
        ([STEP.format(9), *table(1), STEP.format(10), STEP.format(5), STEP.format(6)], [9]),
        # Steps go back where a training rolls back by itself, and nothing has failed.
        ([STEP.format(9), STEP.format(5)], []),
        ([b"\xff\xfe ChildFailedError".decode("latin-1"), "WORLD INFO DICT: {}"], [1]),
    ],
)  # fmt: skip
def test_where_an_attempt_begins(lines: list[str], begins: list[int]) -> None:
    """It begins at a launcher's line, at a record, or at steps that go back after a failure."""
    assert beginnings([line.encode("latin-1") for line in lines]) == begins


def test_files_with_fewer_attempts_have_the_newest(tmp_path: Path) -> None:
    """A rank's own file was started again, next to a launcher's that was not."""
    in_one_file(tmp_path, [BANNER, *table(2)], [BANNER, *table(1)])
    (tmp_path / "rank1.log").write_text(RAISED)
    found = diagnosed(tmp_path)
    assert [(each.verdict.cause, each.verdict.ranks) for each in found.attempts] == [
        (CauseClass.UNKNOWN, (2,)),
        (CauseClass.CODE, (1,)),
    ]
