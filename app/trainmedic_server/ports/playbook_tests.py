"""Tests of playbooks, run from the API."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from trainmedic_core.problems import FileProblem


class PlayedTest(Struct, frozen=True):
    """Passed if ``failures`` is empty. ``seconds`` are real time."""

    name: str
    line: int | None
    seconds: float
    failures: tuple[FileProblem, ...] = ()


class PlayedTests(Struct, frozen=True):
    file: str
    tests: tuple[PlayedTest, ...] = ()
    problems: tuple[FileProblem, ...] = ()
    """Errors in the file or its playbook, which prevented tests."""
    unfinished: str = ""
    """Why there is no outcome; otherwise empty."""

    @property
    def passed(self) -> bool:
        is_whole = bool(self.tests) and not self.problems and not self.unfinished
        return is_whole and not any(test.failures for test in self.tests)


class PlaybookTester(Protocol):
    async def run_tests_of(self, source: str) -> PlayedTests:
        """Run the test file next to the playbook at path `source`, with a time limit and no external effects.

        Raises NotFound without tests, Conflict if too many are running.
        """
        ...
