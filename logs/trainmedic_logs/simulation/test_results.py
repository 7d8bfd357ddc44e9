"""Results of tests, and their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from trainmedic_core.plain_text import visible
from trainmedic_core.problems import FileProblem


class TestResult(Struct, frozen=True):
    """``seconds`` are real time."""

    __test__ = False

    name: str
    line: int | None
    failures: tuple[FileProblem, ...]
    seconds: float


class FileResult(Struct, frozen=True):
    """No tests run if the file or a playbook has problems."""

    path: Path
    results: tuple[TestResult, ...] = ()
    problems: tuple[FileProblem, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems and not any(result.failures for result in self.results)


def results(files: Iterable[FileResult], *, verbose: bool = False) -> Iterator[str]:
    """Yield a line per file, its failures, and at the end the sum; with `verbose` also passed tests."""
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
