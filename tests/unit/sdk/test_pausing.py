"""A pause lasts as long as it was told to, on all ranks for the same number of polls."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any, cast

import pytest

from trainmedic.recovery.pausing import LoopPause

LENGTH = timedelta(seconds=2)


class Job:
    """A job with a clock of its own; each poll for commands takes ``seconds``."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.time = 1000.0
        self.polls = 0
        self.pause = LoopPause(cast(Any, self), self.sleep, lambda: self.time)

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def window(self, kind: str) -> nullcontext[None]:
        return nullcontext()

    def commands(self, step: int) -> None:
        self.polls += 1
        self.time += self.seconds


@pytest.mark.parametrize("seconds", [0.0, 0.02], ids=["quick", "slow"])
def test_slow_polls_do_not_lengthen_a_pause(seconds: float) -> None:
    job = Job(seconds)
    began = job.time
    job.pause.start(LENGTH, "one")
    job.pause.wait(7)
    assert job.time - began == pytest.approx(2.0, abs=0.05)
    assert job.polls == 40


def test_few_polls_follow_at_once_after_a_long_command() -> None:
    # Sync points between ranks become rarer while polls are quick, and stay so for as many steps.
    job = Job()
    times: list[float] = []

    def commands(step: int) -> None:
        times.append(job.time)
        if len(times) == 3:
            job.time += 60.0  # such as a checkpoint

    job.commands = commands  # type: ignore[method-assign]
    job.pause.start(timedelta(seconds=90), "one")
    job.pause.wait(7)
    assert len(times) == 1800
    assert sum(time == times[3] for time in times) <= 21


def test_a_pause_begun_anew_after_a_long_command_has_its_whole_length() -> None:
    """The time that the command took belongs to the pause before."""
    job = Job()
    ends: list[float] = []

    def commands(step: int) -> None:
        if job.polls == 3:
            job.time += 30.0  # such as a checkpoint
            job.pause.start(LENGTH, "two", extends="one")
            ends.append(job.time + 2.0)
        job.polls += 1

    job.commands = commands  # type: ignore[method-assign]
    job.pause.start(LENGTH, "one")
    job.pause.wait(7)
    assert job.time == pytest.approx(ends[0], abs=0.05)
