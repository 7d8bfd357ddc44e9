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
def test_the_last_printed_error_is_recognized_by_its_type(printed: str, kind: str) -> None:
    """Launchers' prefixes are skipped, and torchrun's closing lines do not count."""
    assert error_kind(printed) == kind


def test_the_rank_that_failed_first_is_the_cause() -> None:
    """Torchrun's own summary names it last."""
    assert causes.rank_ends(SUMMARY) == [RankEnd(3, -9, 3, 4714), RankEnd(0, 1, 0, 4711)]
    assert causes.rank_ends("no summary") == []


def test_retries_are_limited() -> None:
    """They have different causes and make no progress."""
    failed = attempts((KILLED, 5), (RAISED, 5), (KILLED, 5), (RAISED, 5))
    assert refusal(failed[:3], 3) is None
    assert "--retries is 3" in str(refusal(failed, 3))
    assert str(refusal(failed[:1], 0)).endswith("it has failed once, and --retries is 0")


def test_the_same_cause_three_times_without_progress_ends_the_job() -> None:
    """Another cause in between, or progress, does not end it."""
    assert refusal(attempts((KILLED, 5), (KILLED, 5), (KILLED, 4)), 9) is not None
    assert refusal(attempts((KILLED, 5), (RAISED, 5), (KILLED, 5)), 9) is None
    assert refusal(attempts((KILLED, 5), (KILLED, 5), (KILLED, 6)), 9) is None


def test_progress_resets_the_count() -> None:
    """A job of weeks may fail now and then; one that never reported a step has made no progress."""
    assert refusal(attempts(*((KILLED, step) for step in range(100))), 3) is None
    assert refusal(attempts((KILLED, -1), (RAISED, -1)), 1) is not None


def test_a_cause_is_described_in_words() -> None:
    """The log, the history and the playbooks use the description."""
    assert str(KILLED) == "rank 1 was ended by SIGKILL"
    assert str(RAISED) == "rank 0 ended with exit code 1 (ValueError)"
    assert str(Cause(0, causes.HANG)) == "the job hung"
    assert str(Cause(1, "RuntimeError", 1, lost_peer=True)) == "rank 1 lost another rank (RuntimeError)"


LOST = (
    "Traceback (most recent call last):\n"
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4471"
)
LOST_NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1691, NCCL version 2.20.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)
LED = "The above exception was the direct cause of the following exception:"
WRAPPED = f"{LOST}\n\n{LED}\n\nTraceback (most recent call last):\nTrainingError: step 7"
BUCKET = "botocore.exceptions.ConnectionClosedError: Connection was closed: Connection reset by peer"
CLOSING = "W0131 api.py:1028] Sending process 40 closing signal SIGTERM\n"


@pytest.mark.parametrize(
    ("text", "is_victims"),
    [
        (LOST, True),
        (LOST_NCCL, True),
        (WRAPPED, True),
        (f"{LOST}\nretrying\nTraceback (most recent call last):\nKeyError: 'x'", False),
        (BUCKET, False),
        ("ValueError: rank 3 timed out", False),
        ("", False),
    ],
)
def test_a_rank_that_lost_another_one_is_recognized_by_its_last_error(text: str, is_victims: bool) -> None:
    """An error that led to it counts too. One that lost a connection to storage lost no rank."""
    assert causes.last_error(text).is_victims is is_victims


@pytest.mark.parametrize(
    ("ends", "own", "printed", "cause"),
    [
        # By its error file's time the first is a rank that lost its peer, and torchrun ended it.
        ([RankEnd(0, -15, 0, 40), RankEnd(1, 7, 1, 41)], {0: LOST, 1: ""}, CLOSING, Cause(7, "", 1)),
        # It ended by itself, before torchrun looked.
        ([RankEnd(0, 1, 0, 42), RankEnd(1, 7, 1, 41)], {0: LOST, 1: ""}, "", Cause(7, "", 1)),
        ([RankEnd(0, 1, 0, 42), RankEnd(2, -9, 2, 43)], {0: LOST_NCCL, 2: "ValueError: caught"}, "", Cause(-9, "", 2)),
        ([RankEnd(3, -11, 3, 43)], {3: LOST}, CLOSING, Cause(-11, "", 3)),
        # An older torchrun prints nothing of whom it ends.
        ([RankEnd(0, -15, 0, 40), RankEnd(1, 1, 1, 41)], {1: "KeyError: 1"}, "", Cause(1, "KeyError", 1)),
        # Somebody ended a rank by SIGTERM, and torchrun the others.
        ([RankEnd(1, -15, 1, 41), RankEnd(0, -15, 0, 40)], {}, CLOSING, Cause(-15, "", 1)),
        # The same, and the other one left by itself before torchrun looked.
        ([RankEnd(1, -15, 1, 41), RankEnd(0, 1, 0, 42)], {0: LOST}, "", Cause(-15, "", 1)),
        # All lost their peer, which may be on another node: torchrun's first one.
        ([RankEnd(5, 1, 1, 42), RankEnd(4, 1, 0, 43)], {5: LOST, 4: LOST}, "", Cause(1, "RuntimeError", 5)),
        # What a rank printed is not known: no other one's error is told for its.
        ([RankEnd(1, 7, 1, 41)], {}, LOST, Cause(7, "", 1)),
    ],
)
def test_torchruns_first_failure_is_the_cause_unless_it_is_a_victim(
    ends: list[RankEnd], own: dict[int, str], printed: str, cause: Cause
) -> None:
    """No signal is reported with an exception, which sends none."""
    assert causes.cause_of(1, ends, own, printed, 30) == cause


def test_the_cause_states_that_all_ranks_of_a_node_lost_another_one() -> None:
    """The first failure was on another node then, and none of these ranks is to be taken for it."""
    ends = [RankEnd(1, 1, 1, 42), RankEnd(0, -15, 0, 40)]
    assert causes.cause_of(1, ends, {1: LOST}, CLOSING, 30).lost_peer
    # The first of them by its error file, which torchrun ended before it had left.
    ended = causes.cause_of(1, ends[::-1], {0: LOST, 1: LOST}, CLOSING, 30)
    assert str(ended) == "rank 1 lost another rank (RuntimeError)"
    assert causes.cause_of(1, ends[1:], {0: LOST}, CLOSING, 30).lost_peer
    assert not causes.cause_of(1, ends, {1: "KeyError: 1"}, CLOSING, 30).lost_peer
    assert not causes.cause_of(1, [*ends, RankEnd(2, -9, 2, 44)], {1: LOST}, CLOSING, 30).lost_peer


@pytest.mark.parametrize(
    ("status", "printed", "cause"),
    [
        (1, "ValueError: bad", Cause(1, "ValueError")),
        (-9, "ValueError: caught\nstep 9", Cause(-9, "")),
        (137, "ValueError: caught\nstep 9", Cause(137, "")),
        (139, "run.sh: Segmentation fault\nSegmentation fault", Cause(139, "Segmentation fault")),
    ],
)
def test_a_plain_programs_cause_is_its_own_end(status: int, printed: str, cause: Cause) -> None:
    """For a signal it is at most the word that a shell prints."""
    assert causes.cause_of(status, [], {}, printed, 30) == cause


def test_the_lines_of_a_rank_are_recognized_by_their_prefixes() -> None:
    """PyTorch's prefix counts, or else torchrun's, which counts the ranks of its node."""
    text = "[default1]:[rank5]: KeyError: 1\n[default0]:LostError: x\n[default1]:Killed\nplain\n[rank9]: other"
    assert causes.lines_of(RankEnd(5, 1, 1), text) == "[default1]:[rank5]: KeyError: 1\n[default1]:Killed"
    assert causes.lines_of(RankEnd(9, 1, 7), text) == "[rank9]: other"
    assert causes.lines_of(RankEnd(9, 1, 7), "no marks") is None


def test_only_a_step_beyond_all_earlier_ones_is_progress() -> None:
    """The last attempt alone decides: if it made progress, the next one starts soon."""
    assert causes.has_progress(attempts((KILLED, 5)))
    assert causes.has_progress(attempts((KILLED, 5), (KILLED, 6)))
    assert not causes.has_progress(attempts((KILLED, 5), (KILLED, 5)))
    assert not causes.has_progress(attempts((KILLED, 9), (KILLED, 5)))
    assert not causes.has_progress(attempts((KILLED, -1)))
    assert not causes.has_progress([])


@pytest.mark.parametrize("digits", [10, 500, 5000])
def test_a_job_cannot_print_an_unreadable_number(digits: int) -> None:
    """Python parses none of thousands of digits: such a line would end the launcher, and the job with it."""
    number = "9" * digits
    lines = f"  rank : {number} (local_rank: 0)\n  exitcode : -{number} (pid: 1)\n"
    assert causes.rank_ends(lines) == []
    printed = SUMMARY + f"Sending process {number} closing signal SIGTERM\n"
    assert causes.cause_of(1, causes.rank_ends(printed), {}, printed, None) == Cause(-9, "", 3)
