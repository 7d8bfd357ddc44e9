"""What all unit tests share: patterns of log rules are compiled once in a process, and engines' hearts beat slowly."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import timedelta

import pytest

from trainmedic_core.expressions import regexes
from trainmedic_server.engine import service, timeline

HEARTBEAT = timeline.HEARTBEAT

_compiled_once = functools.lru_cache(maxsize=4096)(regexes._compiled)


@pytest.fixture(autouse=True)
def patterns_compiled_once() -> Iterator[None]:
    """Keep compiled patterns from test to test: they are immutable, and compiling the shipped rules takes three
    quarters of a diagnosis."""
    compiled, regexes._compiled = regexes._compiled, _compiled_once
    yield
    regexes._compiled = compiled


@pytest.fixture(autouse=True)
def slow_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time, heartbeats of servers took half of the time of tests that play hours."""
    _set_heartbeat(monkeypatch, timedelta(minutes=1))


@pytest.fixture
def usual_heartbeat(slow_heartbeat: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As servers have it, for tests of what it notices."""
    _set_heartbeat(monkeypatch, HEARTBEAT)


def _set_heartbeat(monkeypatch: pytest.MonkeyPatch, every: timedelta) -> None:
    for module in (service, timeline):
        monkeypatch.setattr(module, "HEARTBEAT", every)
