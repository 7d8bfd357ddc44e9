"""What an attempt ended by, as it is read from what was printed, and whether another one is worth it."""

from __future__ import annotations

import pytest

from trainmedic.launch import causes
from trainmedic.launch.causes import AttemptRecord, Cause, RankEnd, Reached, error_kind, refusal

KILLED, RAISED = Cause(-9, "", 1), Cause(1, "ValueError", 0)
SUMMARY = """
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[0]:
  time      : 2026-01-31_12:00:01
  host      : node-1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4711)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[1]:
  time      : 2026-01-31_12:00:00
  host      : node-1
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 4714)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4714
============================================================
"""


def attempts(*ended: tuple[Cause, int]) -> list[AttemptRecord]:
    return [AttemptRecord(number, cause, Reached(step)) for number, (cause, step) in enumerate(ended, 1)]


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("Traceback (most recent call last):\n  File ...\nValueError: bad", "ValueError"),
        ("[rank3]: torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError"),
        ("[default1]:[rank1]:RuntimeError: NCCL error", "RuntimeError"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("ValueError: first\n\nDuring handling ...\nKeyError: 'second'\nbye\n", "KeyError"),
        ("RuntimeError: x\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n", "RuntimeError"),
        ("slurmstepd: error: Detected 1 oom-kill event(s)\nKilled\n", "Killed"),
        ("loss 1.5\nError rates: low\n", ""),
        ("", ""),
    ],
)
def test_the_last_error_that_was_printed_is_known_by_its_kind(printed: str, kind: str) -> None:
    """Behind the prefixes of launchers, and not by what torchrun ends with."""
    assert error_kind(printed) == kind


def test_the_rank_that_failed_first_is_the_cause() -> None:
    """By torchrun's own summary, which has it last."""
    assert causes.rank_ends(SUMMARY) == [RankEnd(3, -9, 3, 4714), RankEnd(0, 1, 0, 4711)]
    assert causes.rank_ends("no summary") == []


def test_so_many_retries_are_made() -> None:
    """By different causes, without progress."""
    failed = attempts((KILLED, 5), (RAISED, 5), (KILLED, 5), (RAISED, 5))
    assert refusal(failed[:3], 3) is None
    assert "--retries is 3" in str(refusal(failed, 3))
    assert "--retries is 0" in str(refusal(failed[:1], 0))


def test_the_same_cause_three_times_without_progress_is_the_end() -> None:
    """Another cause in between, or progress, is not."""
    assert refusal(attempts((KILLED, 5), (KILLED, 5), (KILLED, 4)), 9) is not None
    assert refusal(attempts((KILLED, 5), (RAISED, 5), (KILLED, 5)), 9) is None
    assert refusal(attempts((KILLED, 5), (KILLED, 5), (KILLED, 6)), 9) is None


def test_progress_begins_the_count_anew() -> None:
    """A job of weeks may fail now and then; one that never reported a step has made none."""
    assert refusal(attempts(*((KILLED, step) for step in range(100))), 3) is None
    assert refusal(attempts((KILLED, -1), (RAISED, -1)), 1) is not None


def test_a_cause_is_told_in_words() -> None:
    """For the log, the history and the playbooks."""
    assert str(KILLED) == "rank 1 was ended by SIGKILL"
    assert str(RAISED) == "rank 0 ended with exit code 1 (ValueError)"
    assert str(Cause(0, causes.HANG)) == "the job hung"
