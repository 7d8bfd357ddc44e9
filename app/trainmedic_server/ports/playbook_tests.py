"""Runs the tests that stand beside a playbook, for whoever looks at it on the server."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from trainmedic_core.problems import FileProblem


class PlayedTest(Struct, frozen=True):
    """One test, which passed where there are no failures. ``seconds`` are of real time."""

    name: str
    line: int | None
    seconds: float
    failures: tuple[FileProblem, ...] = ()


class PlayedTests(Struct, frozen=True):
    """What came of the tests in one file."""

    file: str
    tests: tuple[PlayedTest, ...] = ()
    problems: tuple[FileProblem, ...] = ()
    """Why no test was run: mistakes in the file, or in a playbook of it."""
    unfinished: str = ""
    """Why there is no outcome; empty where there is one."""

    @property
    def passed(self) -> bool:
        is_whole = bool(self.tests) and not self.problems and not self.unfinished
        return is_whole and not any(test.failures for test in self.tests)


class PlaybookTester(Protocol):
    """Runs tests, bounded in time and without any effect outside."""

    async def run_beside(self, source: str) -> PlayedTests:
        """Run the tests beside the playbook file `source`. Raises NotFound where there are none, and
        Conflict where as many as are allowed are being run."""
        ...


class NoPlaybookTester:
    """A tester that finds no tests, for a server in a process of tests."""

    async def run_beside(self, source: str) -> PlayedTests:
        return PlayedTests(source, unfinished="This server runs no tests.")
