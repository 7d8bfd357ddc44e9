"""Verdicts on ordinary exceptions of many libraries: high confidence is never wrong, and medium seldom."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.log_rules import shipped
from trainmedic_logs.diagnosis.verdict import Confidence, Verdict
from trainmedic_logs.folder_diagnosis import diagnose_folder

ROWS: list[Mapping[str, Any]] = yaml.load(
    Path(__file__).with_name("ordinary_exceptions.yaml").read_bytes(), yaml.CSafeLoader
)
HEAD = 'step 10 loss 2.1\nTraceback (most recent call last):\n  File "/home/ada/train.py", line 31, in <module>\n'
PLACES = {
    "program": f'{HEAD}    main()\n  File "/home/ada/train.py", line 22, in main\n',
    "library": f'{HEAD}    main()\n  File "/opt/venv/lib/python3.11/site-packages/some/module.py", line 7, in call\n',
}


@cache
def verdicts() -> list[tuple[str, Mapping[str, Any], Verdict]]:
    """The verdict on each exception in each place."""
    return list(_verdicts())


def _verdicts() -> Iterator[tuple[str, Mapping[str, Any], Verdict]]:
    rules = shipped()
    for row in ROWS:
        for place, frames in PLACES.items():
            with tempfile.TemporaryDirectory() as folder:
                log = f"{frames}    {row.get('shown', 'work(batch)')}\n{row['line']}\n"
                Path(folder, "train.log").write_text(log, encoding="utf-8")
                yield place, row, diagnose_folder(Path(folder), rules).attempts[-1].verdict


def is_true(row: Mapping[str, Any], verdict: Verdict) -> bool:
    """Return whether the verdict states the truth."""
    return verdict.cause.value in (row["truth"], row.get("also"))


def test_high_confidence_is_never_wrong() -> None:
    """Only the stated true cause counts."""
    high = [each for each in verdicts() if each[2].confidence is Confidence.HIGH]
    assert [(place, row["line"]) for place, row, verdict in high if not is_true(row, verdict)] == []
    assert len(high) >= 40


def test_medium_confidence_is_right_or_acceptable() -> None:
    """This holds in 95 % of the cases."""
    counts = Counter(
        is_true(row, verdict) or verdict.cause.value in row.get("accept", ())
        for _, row, verdict in verdicts()
        if verdict.confidence is Confidence.MEDIUM
    )
    assert counts[True] / counts.total() >= 0.95


@pytest.mark.parametrize("row", [row for row in ROWS if row.get("firm")], ids=lambda row: row["line"][:40])
def test_each_error_of_a_family_states_its_cause(row: Mapping[str, Any]) -> None:
    """It does so in both places."""
    stated = [verdict.cause.value for _, each, verdict in verdicts() if each is row]
    assert all(cause in (row["truth"], row.get("also"), *row.get("accept", ())) for cause in stated), stated


@pytest.mark.parametrize("row", [row for row in ROWS if row.get("sure")], ids=lambda row: row["line"][:40])
def test_a_program_only_fault_is_reported_with_high_confidence(row: Mapping[str, Any]) -> None:
    """It is printed in a file of its own."""
    (verdict,) = [verdict for place, each, verdict in verdicts() if each is row and place == "program"]
    assert (verdict.cause.value, verdict.confidence) == ("code", Confidence.HIGH)
