"""Starting and watching the reader, in virtual time."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from typing import Any

import pytest

from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.log_link.reader_supervisor import CONNECT_SECONDS, ReaderSupervisor


class Child:
    """A process that a test ends."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.is_stopped = False

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            raise subprocess.TimeoutExpired("reader", timeout or 0.0)
        return self.returncode


class Link:
    """What the supervisor uses of a `AgentEnd`."""

    def __init__(self) -> None:
        self.is_connected = True
        self.answers = True
        self.generation = 0

    def beat(self) -> bool:
        return self.answers

    def drop(self) -> None:
        self.is_connected = False


class Watched:
    """A supervisor, its children, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.link: Any = Link()
        self.children: list[Child] = []
        self.fails = False
        self.supervisor = ReaderSupervisor(self.link, self._start, AgentCounters(), lambda: self.now)

    def _start(self) -> Any:
        if self.fails:
            raise FileNotFoundError(2, "No such file or directory")
        self.children.append(Child())
        self.link.is_connected = True
        return self.children[-1]

    def until(self, moment: float) -> None:
        """Look each quarter of a second."""
        while self.now < moment:
            self.supervisor.round()
            self.now += 0.25


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_the_pause_between_starts_doubles(watched: Watched) -> None:
    """A reader that ends at once is restarted after 1, 2, 4 … 60 s."""
    starts: list[float] = []
    while len(starts) < 10:
        watched.supervisor.round()
        if len(watched.children) > len(starts):
            starts.append(watched.now)
            watched.children[-1].returncode = 1
        watched.now += 0.25
    pauses = [round(later - earlier) for earlier, later in pairwise(starts)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert watched.supervisor.restarts == 9


def test_the_pause_is_short_again_after_a_minute_of_work(watched: Watched) -> None:
    """Old failures delay no start."""
    for _ in range(4):
        watched.supervisor.round()
        watched.children[-1].returncode = 1
        watched.until(watched.now + 20)
    watched.until(watched.now + 65)
    before = len(watched.children)
    watched.children[-1].returncode = 1
    watched.until(watched.now + 2)
    assert len(watched.children) == before + 1


def test_an_unresponsive_reader_is_ended_and_restarted(watched: Watched) -> None:
    """A stopped process does not end by itself."""
    watched.until(5)
    watched.link.answers = False
    watched.until(7)
    assert watched.children[0].returncode == -9
    watched.link.answers = True
    watched.until(10)
    assert len(watched.children) == 2


def test_a_reader_that_never_connects_is_ended(watched: Watched) -> None:
    """A child exists, and yet nothing is read."""
    watched.supervisor.round()
    watched.link.is_connected = False
    watched.until(CONNECT_SECONDS - 1)
    assert watched.children[0].returncode is None
    watched.until(CONNECT_SECONDS + 2)
    assert watched.children[0].returncode == -9


def test_a_failed_start_is_retried(watched: Watched) -> None:
    """The pauses are the same."""
    watched.fails = True
    watched.until(10)
    watched.fails = False
    watched.until(20)
    assert len(watched.children) == 1


def test_a_child_stopped_by_a_signal_is_replaced(watched: Watched) -> None:
    """It opens the files: what reads them answers heartbeats, and reads nothing. A moment, as of a debugger, is
    none."""
    watched.until(10.0)
    watched.children[0].is_stopped = True
    watched.until(11.0)
    watched.children[0].is_stopped = False
    watched.until(20.0)
    assert len(watched.children) == 1
    watched.children[0].is_stopped = True
    watched.until(30.0)
    assert (len(watched.children), watched.children[0].returncode) == (2, -9)
