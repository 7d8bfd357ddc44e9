"""Reliability by confidence over public failures: high is never wrong, and is said often enough."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from benchmarks.verdicts import Judged, Outcome, all_judged, table
from trainmedic_logs.diagnosis.verdict import Confidence
from trainmedic_logs.domain.finding import CauseClass

FOLDERS = ("public_cases", "own_cases")
_GOOD = (Outcome.RIGHT, Outcome.LENIENT)


@cache
def results(folder: str) -> Sequence[Judged]:
    """The verdicts on the cases of a folder."""
    return all_judged(Path(__file__).with_name(folder))


def of(folder: str, confidence: Confidence) -> list[Judged]:
    """Those with this confidence."""
    return [each for each in results(folder) if each.verdict.confidence is confidence]


@pytest.mark.parametrize("folder", FOLDERS)
def test_high_confidence_is_never_wrong(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the stated true cause and ranks count. The table is printed."""
    with capsys.disabled():
        print(f"\n{folder}\n{table(results(folder))}")
    wrong = [each.case.id for each in of(folder, Confidence.HIGH) if each.outcome is not Outcome.RIGHT]
    assert wrong == []
    assert [each.case.id for each in of(folder, Confidence.HIGH) if each.is_culprit_right is False] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_medium_confidence_is_right_in_85_percent_of_cases(folder: str) -> None:
    """A cause that a person would accept counts too; a verdict without a cause does not."""
    medium = of(folder, Confidence.MEDIUM)
    right = sum(each.outcome in _GOOD for each in medium)
    assert right / len(medium) >= 0.85


@pytest.mark.parametrize("folder", FOLDERS)
def test_most_causes_are_found(folder: str) -> None:
    """At least 70 % of all are exactly right; `unknown` is right only where the cause cannot be known."""
    right = sum(each.outcome is Outcome.RIGHT for each in results(folder))
    assert right / len(results(folder)) >= 0.7


@pytest.mark.parametrize("folder", FOLDERS)
def test_high_confidence_is_not_rare(folder: str) -> None:
    """At least a fifth of the verdicts on real failures must be high; never being confident is no calibration."""
    assert len(of(folder, Confidence.HIGH)) / len(results(folder)) >= 0.2


@pytest.mark.parametrize("folder", FOLDERS)
def test_stop_is_advised_only_with_high_confidence(folder: str) -> None:
    """A verdict without a known cause is a hint."""
    for each in results(folder):
        assert each.verdict.advice != "stop" or each.verdict.confidence is Confidence.HIGH
        assert each.verdict.cause is not CauseClass.UNKNOWN or each.verdict.confidence is Confidence.LOW
