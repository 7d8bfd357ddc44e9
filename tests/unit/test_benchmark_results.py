"""What `benchmarks/run` keeps, and how it compares two runs."""

from __future__ import annotations

from typing import Any

from benchmarks.run import BENCHMARKS, LONG, Result, compared, figures, machine, run, table
from tests.support.programs import ROOT


def result(*lines: str, status: int = 0) -> dict[str, Any]:
    return {"name": "storm", "lines": lines, "status": status, "load_before": 0.1, "disturbed": False}


STARTED = {"run", "fleet_members", "waiting_job"}
"""Itself, and programs that benchmarks start."""
NOT_RUN = {"real_gpu", "agent_with_pydantic"}
"""What needs a GPU, and what a decision was measured with."""


def test_every_benchmark_is_run_and_in_the_readme() -> None:
    """Those that print something of their own."""
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()} - STARTED
    assert {words[0] for words in (*BENCHMARKS.values(), *LONG.values())} == (there - NOT_RUN) | {"unattended"}
    readme = (ROOT / "benchmarks/README.md").read_text()
    assert [name for name in there if f"benchmarks.{name}`" not in readme] == []


def test_numbers_are_compared_by_the_words_around_them() -> None:
    """Whatever order the lines have; a line whose words have changed has nothing to compare with."""
    assert figures(["p99 1,234 ms of 2 in v1.2"]) == {"p99 # ms of # in v1.2": [1234, 2]}
    earlier = result("storm: 4 s, p99 245 ms", "other: 7")
    now = result("new words: 7", "storm: 2 s, p99 246 ms")
    assert compared(now, earlier) == ["storm: 2/4 = 0.50"]


def test_a_benchmark_that_fails_is_said_to_and_gives_no_figures() -> None:
    """Its lines are kept."""
    failed = run("nothing", ("there_is_no_such_benchmark",))
    assert failed.status != 0
    document = {"at": "now", "machine": machine(), "results": [result("storm: 3 s", status=1)]}
    told = table(document, {"results": []})
    assert "failed with status 1" in told
    assert "storm: 3 s" not in told
    assert document["machine"]["cores"] >= 1


def test_other_work_beside_it_is_said() -> None:
    """By the load before it."""
    assert Result("storm", "", 0, 1.0, 1000.0, ()).is_disturbed
    assert not Result("storm", "", 0, 1.0, 0.0, ()).is_disturbed
