"""Lines after a finding count once, also if a block before them is recognised late."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.diagnosis.recovery_evidence import RecoveryEvidence
from trainmedic_logs.domain.finding import CauseClass, Finding, Origin, Role
from trainmedic_logs.lines.line import Line

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


def line(place: int, text: str, rank: int | None = None, **record: Any) -> Line:
    origin = Origin("training", "node-1", "llm-1", rank=rank, stream="rank0.log")
    return Line(origin, AT + timedelta(seconds=place), text, place=place, number=place, record=record or None)


def finding(name: str, cause: CauseClass, at: Line) -> Finding:
    target = Target(TargetKind.JOB, job="llm-1")
    return Finding(name, name, Role.ROOT, cause, target, at.origin, at.at, at.at, at.text)


def test_a_line_without_a_rank_counts_once_for_an_earlier_finding() -> None:
    """The block of another rank, recognised two lines later, has the lines counted for itself alone."""
    evidence = RecoveryEvidence()
    first, second = line(1, "ValueError: a", rank=0), line(2, "ValueError: b", rank=1)
    evidence.take_findings(first, [finding("first", CauseClass.CODE, first)])
    for place in (3, 4):
        evidence.take_plain_line(line(place, "saving the tokenizer"), is_timed=False)
    evidence.take_findings(second, [finding("second", CauseClass.CODE, second)])
    assert not evidence.followed
    evidence.take_plain_line(line(5, "saving the tokenizer"), is_timed=False)
    assert evidence.followed == {"first": 1, "second": 1}


def test_a_finite_step_counts_once_for_earlier_non_finite_numbers() -> None:
    """Ten of them show that the numbers have recovered; six that are read again do not."""
    evidence = RecoveryEvidence()
    nan, late = line(1, "loss is nan", rank=0), line(2, "ValueError: b", rank=0)
    evidence.take_findings(nan, [finding("nan", CauseClass.NUMERICS, nan)])
    for place in range(3, 9):
        evidence.take_plain_line(line(place, "step", rank=0, event="step", loss=2.0), is_timed=True)
    evidence.take_findings(late, [finding("late", CauseClass.CODE, late)])
    assert (evidence.followed["nan"], "nan" in evidence.outlived) == (6, False)
