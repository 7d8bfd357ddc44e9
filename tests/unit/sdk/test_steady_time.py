"""The time of day of a process: it follows the machine's clock, and not its jumps."""

from __future__ import annotations

from datetime import UTC

import pytest

from trainmedic.wire.steady_time import BELIEVED_AFTER_SECONDS, ClockStep, SteadyTime, since_boot, utc_now

DAY = 86_400.0


class Machine:
    """A clock that can be set, and a time since boot that cannot."""

    def __init__(self) -> None:
        self.clock = 1_800_000_000.0
        self.elapsed = 5_000.0
        self.told: list[ClockStep] = []
        self.time = SteadyTime(lambda: self.clock, lambda: self.elapsed, self.told.append)

    def passes(self, seconds: float) -> None:
        self.clock += seconds
        self.elapsed += seconds

    def kinds(self) -> list[str]:
        return [step.kind for step in self.told]


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_it_is_the_time_of_the_machine(machine: Machine) -> None:
    """Also where the clock runs a little faster or slower for long, as NTP makes it, and is put right by seconds."""
    for _ in range(1000):
        machine.passes(3600)
        machine.clock += 30
        assert machine.time.unix_now() == machine.clock
    assert machine.told == []


@pytest.mark.parametrize("seconds", [100 * DAY, -7200.0, 61.0, -61.0])
def test_a_jump_is_told_once_and_not_followed(machine: Machine, seconds: float) -> None:
    """The time goes on from where it was, as fast as ever."""
    before = machine.time.unix_now()
    machine.clock += seconds
    for passed in range(0, 600, 60):
        assert machine.time.unix_now() == pytest.approx(before + passed)
        machine.passes(60)
    assert [(step.kind, round(step.seconds)) for step in machine.told] == [("stepped", round(seconds))]
    assert machine.time.ahead == pytest.approx(seconds)


def test_a_clock_that_is_put_right_is_followed_again(machine: Machine) -> None:
    """As if nothing had been."""
    machine.clock += 100 * DAY
    machine.time.unix_now()
    machine.passes(300)
    machine.clock -= 100 * DAY
    assert machine.time.unix_now() == machine.clock
    assert (machine.kinds(), machine.time.ahead) == (["stepped", "returned"], 0)


@pytest.mark.parametrize("seconds", [100 * DAY, -7200.0])
def test_a_time_at_which_the_clock_stays_is_believed(machine: Machine, seconds: float) -> None:
    """A machine that was booted with a wrong clock is not wrong for ever."""
    machine.clock += seconds
    machine.time.unix_now()
    machine.passes(BELIEVED_AFTER_SECONDS - 1)
    assert machine.time.unix_now() == pytest.approx(machine.clock - seconds)
    machine.passes(2)
    assert machine.time.unix_now() == machine.clock
    assert (machine.kinds(), machine.time.ahead) == (["stepped", "believed"], 0)


def test_a_clock_that_goes_on_jumping_is_not_believed(machine: Machine) -> None:
    """Each jump is told, and begins the wait anew."""
    before = machine.time.unix_now()
    for number in range(10):
        machine.clock += DAY
        machine.time.unix_now()
        machine.passes(BELIEVED_AFTER_SECONDS - 1)
        passed = (number + 1) * (BELIEVED_AFTER_SECONDS - 1)
        assert machine.time.unix_now() == pytest.approx(before + passed)
    assert machine.kinds() == ["stepped"] * 10


def test_the_time_that_the_machine_sleeps_passes(machine: Machine) -> None:
    """A laptop that was closed for a night has not had its clock set."""
    machine.passes(8 * 3600)
    assert machine.time.unix_now() == machine.clock
    assert machine.told == []


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (ClockStep(7200, "stepped"), "set 7200 s forward; the time from before is kept"),
        (ClockStep(-7200, "stepped"), "set 7200 s back"),
        (ClockStep(-7200, "believed"), "which was set 7200 s back, is followed from now on"),
        (ClockStep(0, "returned"), "agrees with the kept time again"),
    ],
)
def test_a_person_is_told_what_it_was(step: ClockStep, said: str) -> None:
    """By how much, which way, and what comes of it."""
    assert said in str(step)


def test_the_time_of_the_process_is_aware_and_in_utc() -> None:
    """And the time since boot goes on."""
    assert utc_now().tzinfo is UTC
    assert since_boot() <= since_boot()
