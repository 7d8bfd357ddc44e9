"""torchrun's table of failures where ranks have left their error files: a traceback stands within it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.diagnosis.test_scenes import shipped_rules
from tests.unit.logs.reading import lines
from trainmedic_logs.diagnosis.verdict import Confidence
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.folder_diagnosis import diagnose_folder

ROW = """[{number}]:
  time      : 2026-01-31_12:00:0{number}
  host      : node-1
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code}
  error_file: {file}
  traceback : {said}"""
RAISED = """Traceback (most recent call last):
    File "train.py", line 43, in <module>
      step.backward(loss)
  {error}
  """
GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:6576: Connection reset by peer."


def table(root: str, *others: str) -> str:
    rule = "=" * 60
    parts = [rule, "train.py FAILED", "-" * 60, "Failures:", *others, "-" * 60, "Root Cause (first observed failure):"]
    return "\n".join([*parts, root, rule, ""])


def victim(number: int, rank: int) -> str:
    said = RAISED.format(error=GLOO)
    return ROW.format(number=number, rank=rank, code=f"-15 (pid: {10 + rank})  (SIGTERM)", file="/e.json", said=said)


KILLED = ROW.format(
    number=0, rank=2, code="-9 (pid: 12)  (SIGKILL)", file="<N/A>", said="Signal 9 (SIGKILL) received by PID 12"
)


@pytest.mark.parametrize("prefix", ["", "node-1: "])
def test_a_traceback_in_a_table_is_not_used_as_a_prefix(prefix: str) -> None:
    """The tables of several ranks stay whole, and no bare heading of a traceback is left over."""
    raw = "".join(f"{prefix}{text}\n" for text in table(KILLED, victim(1, 1), victim(2, 3)).splitlines())
    texts = [each.text for each in lines(raw.encode())]
    assert not any(text.startswith("Traceback") for text in texts)
    assert any("exitcode  : -9" in text and "Signal 9" in text for text in texts) or prefix


def test_victims_tracebacks_in_a_table_blame_no_rank(tmp_path: Path) -> None:
    """A rank was killed, and the table has the tracebacks of those that lost it."""
    (tmp_path / "slurm-1.out").write_text(table(KILLED, victim(1, 1), victim(2, 3)))
    (attempt,) = diagnose_folder(tmp_path, shipped_rules()).attempts
    assert (attempt.verdict.cause, attempt.verdict.ranks) == (CauseClass.UNKNOWN, (2,))
    assert attempt.verdict.confidence is Confidence.LOW


def test_the_exception_of_the_root_cause_is_reported(tmp_path: Path) -> None:
    """The table is the only source."""
    raised = RAISED.format(error="KeyError: 'labels'")
    root = ROW.format(number=0, rank=2, code="1 (pid: 12)", file="/e.json", said=raised)
    (tmp_path / "slurm-1.out").write_text(table(root, victim(1, 1)))
    (attempt,) = diagnose_folder(tmp_path, shipped_rules()).attempts
    assert "rank 2 (node-1): it ended first, with exit code 1: KeyError: 'labels'." in attempt.verdict.summary
    assert (attempt.verdict.cause, attempt.verdict.confidence) == (CauseClass.CODE, Confidence.MEDIUM)


def test_an_exception_in_the_table_is_no_second_evidence_source(tmp_path: Path) -> None:
    """A rank's log states it already."""
    raised = RAISED.format(error="KeyError: 'labels'")
    root = ROW.format(number=0, rank=2, code="1 (pid: 12)", file="/e.json", said=raised)
    (tmp_path / "slurm-1.out").write_text("[rank2]: KeyError: 'labels'\n" + table(root, victim(1, 1)))
    (attempt,) = diagnose_folder(tmp_path, shipped_rules()).attempts
    assert (attempt.verdict.cause, attempt.verdict.confidence) == (CauseClass.CODE, Confidence.MEDIUM)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("MemoryError", CauseClass.HOST_MEMORY),
        ("numpy.core._exceptions.MemoryError: Unable to allocate 30.0 GiB for an array", CauseClass.HOST_MEMORY),
        ("FileNotFoundError: '/dev/nvidia3'", CauseClass.UNKNOWN),
        ("AssertionError: GPU 3 is not visible", CauseClass.UNKNOWN),
        ("AssertionError: peers left the group", CauseClass.UNKNOWN),
        ("AssertionError", CauseClass.UNKNOWN),
    ],
)
def test_an_exception_in_the_table_is_read_as_the_log_rules_read_it(
    error: str, cause: CauseClass, tmp_path: Path
) -> None:
    raised = RAISED.format(error=error)
    root = ROW.format(number=0, rank=2, code="1 (pid: 12)", file="/e.json", said=raised)
    (tmp_path / "slurm-1.out").write_text(table(root, victim(1, 1)))
    (attempt,) = diagnose_folder(tmp_path, shipped_rules()).attempts
    assert (attempt.verdict.cause, attempt.verdict.ranks) == (cause, (2,))
    assert attempt.verdict.confidence is not Confidence.HIGH
