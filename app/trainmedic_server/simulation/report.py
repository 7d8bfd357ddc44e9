"""Test results as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainmedic_core.problems import FileProblem
from trainmedic_logs.simulation.test_results import FileResult


def document(files: Iterable[FileResult]) -> dict[str, Any]:
    return {"files": [_file(file) for file in files]}


def _file(file: FileResult) -> dict[str, Any]:
    tests = [
        {
            "name": result.name,
            "line": result.line,
            "passed": not result.failures,
            "seconds": round(result.seconds, 6),
            "failures": [_problem(failure) for failure in result.failures],
        }
        for result in file.results
    ]
    problems = [_problem(problem) for problem in file.problems]
    return {"file": str(file.path), "passed": file.passed, "problems": problems, "tests": tests}


def _problem(problem: FileProblem) -> dict[str, Any]:
    return {"file": problem.file, "line": problem.line, "column": problem.column, "message": problem.message}
