"""What `benchmarks/run` keeps, and how it compares two runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.run import (
    BENCHMARKS,
    LONG,
    ON_A_GPU,
    EarlierResult,
    EarlierRun,
    Result,
    compared,
    figures,
    machine,
    main,
    run,
    table,
)
from tests.support.programs import ROOT


def result(*lines: str, status: int = 0) -> dict[str, Any]:
    return {"name": "storm", "lines": lines, "status": status, "load_before": 0.1, "disturbed": False}


STARTED = {"run", "fleet_members", "sdk_loop", "waiting_job"}
"""Itself, and programs that benchmarks start."""
APART = {"beside_revision", "local_checkpoints", "log_shippers"}
"""They compare with other revisions, or products that must be installed first: `benchmarks/run` leaves them out."""


def test_every_benchmark_is_run_and_in_the_readme() -> None:
    """Those that print something of their own."""
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()} - STARTED
    assert {words[0] for words in {**BENCHMARKS, **LONG, **ON_A_GPU}.values()} == there - APART | {"unattended"}
    readme = (ROOT / "benchmarks/README.md").read_text()
    assert [name for name in there if not re.search(rf"benchmarks\.{name}[` ]", readme)] == []


def test_numbers_are_compared_by_the_words_around_them() -> None:
    """Whatever order the lines have; a line whose words have changed has nothing to compare with."""
    assert figures(["p99 1,234 ms of 2 in v1.2"]) == {"p99 # ms of # in v1.2": [1234, 2]}
    earlier = EarlierResult("storm", ["storm: 4 s, p99 245 ms", "other: 7"])
    now = result("new words: 7", "storm: 2 s, p99 246 ms")
    assert compared(now, earlier) == ["storm: 2/4 = 0.50"]


def test_a_benchmark_that_fails_is_said_to_and_gives_no_figures() -> None:
    """Its lines are kept."""
    failed = run("nothing", ("there_is_no_such_benchmark",))
    assert failed.status != 0
    document = {"at": "now", "machine": machine(), "results": [result("storm: 3 s", status=1)]}
    told = table(document, EarlierRun([]))
    assert "failed with status 1" in told
    assert "storm: 3 s" not in told
    assert document["machine"]["cores"] >= 1


def test_other_work_beside_it_is_said() -> None:
    """By the load before it."""
    assert Result("storm", "", 0, 1.0, 1000.0, ()).is_disturbed
    assert not Result("storm", "", 0, 1.0, 0.0, ()).is_disturbed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such"], "there is no benchmark no_such"),
        (["--compare", "{there}/none.json"], "--compare: these are no results of an earlier run"),
        (["--compare", "{there}/list.json"], "--compare: these are no results of an earlier run: Expected `object`"),
        (["--compare", "{there}/lines.json"], "Expected `array`, got `int` - at `$.results[0].lines`"),
        (["--json", "{there}"], "--json: the results cannot be kept there"),
        (["--json", "{there}/list.json/x.json"], "--json: the results cannot be kept there"),
        (["--executor", "{there}/none"], "argument --executor: there is no program"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the option and what is wrong."""
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "lines.json").write_text('{"results": [{"name": "storm", "lines": 7}]}')
    monkeypatch.setattr(sys, "argv", ["benchmarks/run", *(word.format(there=tmp_path) for word in words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
