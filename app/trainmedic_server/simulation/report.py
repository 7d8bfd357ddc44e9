"""Shows the simulation's results as text for a terminal: uncoloured, unwrapped lines, so that they can be searched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainmedic_server.domain.plain_text import visible
from trainmedic_server.simulation.suite import FileResult


def results(files: Iterable[FileResult], *, verbose: bool = False) -> Iterator[str]:
    """A line for each file with its failures below it, and the sum at the end; each passed test where `verbose`."""
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
