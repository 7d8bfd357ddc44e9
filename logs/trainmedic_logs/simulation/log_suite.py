"""Tests of log rules without a server, in virtual time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trainmedic_core import duration
from trainmedic_core.problems import DocumentPath, FileProblem, path_text
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_logs.simulation import log_expectations, log_fixtures, log_playback, log_test_format
from trainmedic_logs.simulation.finding_book import FindingBook
from trainmedic_logs.simulation.log_playback import LogPlayback
from trainmedic_logs.simulation.log_test_format import LineEntry, LogCheck, LogSuite, LogTest
from trainmedic_logs.simulation.test_results import FileResult, TestResult

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


def run_file(path: Path) -> FileResult:
    suites, problems = log_test_format.read(path)
    ready: list[tuple[LogSuite, RuleSet, Mapping[str, str]]] = []
    for suite in suites:
        rules = LogRuleLibrary(suite.rules)
        rules.reload()
        fixtures, wrong = log_fixtures.read_fixtures(suite)
        problems.extend([*rules.problems, *wrong, *log_fixtures.unknown_rules(suite, rules.rule_set)])
        ready.append((suite, rules.rule_set, fixtures))
    if problems:
        return FileResult(path, (), tuple(sorted(set(problems))))
    return FileResult(path, tuple(result for each in ready for result in _results(*each)))


def _results(suite: LogSuite, rules: RuleSet, fixtures: Mapping[str, str]) -> Iterator[TestResult]:
    for index, test in enumerate(suite.spec.tests):
        began = time.perf_counter()
        failures = tuple(
            suite.problem(("tests", index, *path), f"{test.name}: {message}")
            for path, message in _RunningTest(test, rules, fixtures).failures()
        )
        yield TestResult(
            test.name, suite.document.problem(("tests", index), "").line, failures, time.perf_counter() - began
        )


class _RunningTest:
    def __init__(self, test: LogTest, rules: RuleSet, fixtures: Mapping[str, str]) -> None:
        self._test = test
        self._playback = LogPlayback(test.job, rules, fixtures)
        self._book = FindingBook(rules, {test.job.name: test.job.nodes})
        self._now = BEGINNING

    def failures(self) -> Iterator[tuple[DocumentPath, str]]:
        test = self._test
        for moment, path, entry in _timeline(test):
            self._advance_to(BEGINNING + moment)
            if isinstance(entry, LineEntry):
                for updates in self._playback.print(entry, self._now):
                    self._book.take(updates, self._now)
            else:
                yield from self._check(entry, path)
        self._advance_to(BEGINNING + test.last_line + log_playback.SETTLE)
        self._advance_to(BEGINNING + (test.end or timedelta(0)))
        for path, check in _checks(test):
            if check.at is None:
                yield from self._check(check, path)

    def _advance_to(self, moment: datetime) -> None:
        settled = BEGINNING + self._test.last_line + log_playback.SETTLE
        while self._test.lines and self._now < moment:
            tick = log_playback.TICK if self._now < settled else log_playback.LAZY_TICK
            self._now = min(self._now + tick, moment)
            for updates in self._playback.tick(self._now):
                self._book.take(updates, self._now)
            self._book.check(self._now)
        self._now = max(self._now, moment)

    def _check(self, check: LogCheck, path: DocumentPath) -> Iterator[tuple[DocumentPath, str]]:
        when = "at the end" if check.at is None else f"at {duration.write(check.at)}"
        differences = [*log_expectations.finding_differences(check, self._book.findings)]
        if check.verdict is not None:
            differences += log_expectations.verdict_differences(check.verdict, self._playback.verdict())
        for each in differences:
            message = f"{when}, {path_text(each.path)}: expected {each.expected}, got {each.got}"
            yield (*path, *each.path), message


def _timeline(test: LogTest) -> Sequence[tuple[timedelta, DocumentPath, LineEntry | LogCheck]]:
    """At equal times lines come first."""
    entries: list[tuple[timedelta, DocumentPath, LineEntry | LogCheck]] = []
    for index, line in enumerate(test.lines):
        entries.extend((line.at + line.every * number, ("lines", index), line) for number in range(line.times))
    entries.extend((check.at, path, check) for path, check in _checks(test) if check.at is not None)
    return sorted(entries, key=lambda entry: entry[0])


def _checks(test: LogTest) -> Iterator[tuple[DocumentPath, LogCheck]]:
    for index, check in enumerate(test.expect):
        yield ("expect", index), check


def server_parts(path: Path) -> Sequence[FileProblem]:
    """Return each suite's first part that only the server can test."""
    suites, _ = log_test_format.read(path)
    firsts = (next(iter(suite.server_parts()), None) for suite in suites)
    return [
        suite.problem(first[0], f"{first[1]}: not tested here; trainmedic-server tests it", at_key=True)
        for suite, first in zip(suites, firsts, strict=True)
        if first is not None
    ]
