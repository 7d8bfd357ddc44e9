"""What happens in a test, in the order of its times. Who uses it: ``suite``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from trainmedic_core.problems import DocumentPath
from trainmedic_logs.simulation.log_test_format import LineEntry
from trainmedic_server.simulation.suite_format import AlertEntry, Check, OrderEntry, TestEntry

_Entry = LineEntry | AlertEntry | OrderEntry | Check


def timeline(test: TestEntry) -> list[tuple[timedelta, DocumentPath, _Entry]]:
    """The entries that have a time, in its order; at one time first lines, then alerts, orders, and checks."""
    entries: list[tuple[timedelta, DocumentPath, _Entry]] = []
    for index, line in enumerate(test.lines):
        entries.extend((line.at + line.every * number, ("lines", index), line) for number in range(line.times))
    entries.extend((alert.at, ("alerts", index), alert) for index, alert in enumerate(test.alerts))
    entries.extend((order.at, ("orders", index), order) for index, order in enumerate(test.orders))
    entries.extend((check.at, path, check) for path, check in checks(test) if check.at is not None)
    return sorted(entries, key=lambda entry: entry[0])


def checks(test: TestEntry) -> Iterator[tuple[DocumentPath, Check]]:
    """What the test expects, each with where it is written."""
    for index, check in enumerate(test.expect):
        yield ("expect", index), check
