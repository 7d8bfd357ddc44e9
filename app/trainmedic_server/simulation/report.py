"""Test results as plain text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trainmedic_core.plain_text import visible
from trainmedic_core.problems import FileProblem
from trainmedic_server.simulation.suite import FileResult


def results(files: Iterable[FileResult], *, verbose: bool = False) -> Iterator[str]:
    """Yield a line per file with failures, and the sum; with `verbose` also passed tests."""
    tests = failed = broken = 0
    seconds = 0.0
    for file in files:
        broken += bool(file.problems)
        bad = [result for result in file.results if result.failures]
        tests += len(file.results)
        failed += len(bad)
        seconds += sum(result.seconds for result in file.results)
        yield f"{'FAIL' if not file.passed else 'ok  '} {file.path} ({len(file.results)} tests)"
        for problem in file.problems:
            yield f"  {problem}"
        for result in file.results:
            if verbose and not result.failures:
                yield f"  ok   {result.name}"
            for failure in result.failures:
                yield "  " + visible(str(failure), keep="\n")
    rate = f", {tests / seconds:.0f} a second" if seconds else ""
    unread = f", {broken} files with mistakes" if broken else ""
    yield f"{tests} tests, {failed} failed{unread}{rate}"


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
