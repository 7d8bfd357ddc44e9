"""Test results as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import asdict

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
            "failures": [asdict(failure) for failure in result.failures],
        }
        for result in file.results
    ]
    problems = [asdict(problem) for problem in file.problems]
    return {"file": str(file.path), "passed": file.passed, "problems": problems, "tests": tests}
