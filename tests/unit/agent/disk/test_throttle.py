"""How a cleaning makes room for others. The tests set the time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from trainmedic_agent.disk import throttle
from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.throttle import Clocks, Throttle, seconds_stalled_for_disk


@dataclass
class Machine:
    """`contention` is the part of the time in which somebody waits for the disk."""

    contention: float = 0.0
    now: float = 0.0
    stalled: float = 0.0
    slept: float = 0.0
    queued: float = 0.0

    def works(self, seconds: float, throttle: Throttle) -> float:
        """Clean for so long; the seconds of the rest after it."""
        self.passes(seconds)
        before = self.slept
        assert throttle.may_continue()
        return self.slept - before

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.stalled += seconds * self.contention

    def sleep(self, seconds: float) -> None:
        self.passes(seconds)
        self.slept += seconds

    def throttle(self, deadline: float = 1e9) -> Throttle:
        clock = Clocks(lambda: self.now, lambda: self.now, lambda: self.queued, lambda: self.stalled, self.sleep)
        return Throttle(clock, deadline, lambda: False)


def test_it_rests_sixteen_times_as_long_as_it_works_while_others_wait_for_the_disk() -> None:
    """The cleaning takes at most a seventeenth of a reader's time."""
    machine = Machine(contention=0.3)
    throttle = machine.throttle()
    for _ in range(20):
        assert machine.works(0.02, throttle) == pytest.approx(0.32)


def test_it_rests_as_long_as_it_works_while_no_process_waits() -> None:
    """The throttle starts gently and then measures the load."""
    machine = Machine()
    throttle = machine.throttle()
    rests = [machine.works(0.02, throttle) for _ in range(8)]
    assert rests[:3] == pytest.approx([0.32, 0.16, 0.08])
    assert rests[5:] == pytest.approx([0.02] * 3)


def test_it_slows_down_again_when_another_process_waits() -> None:
    """It takes a few rests until it is as gentle as at first."""
    machine = Machine()
    throttle = machine.throttle()
    for _ in range(8):
        machine.works(0.02, throttle)
    machine.contention = 1.0
    rests = [machine.works(0.02, throttle) for _ in range(6)]
    assert rests[-1] == pytest.approx(0.32)


def test_no_rest_is_long_enough_to_miss_the_deadline() -> None:
    """A large file may take a second to delete; the answer must still be in time."""
    machine = Machine(contention=1.0)
    assert machine.works(5, machine.throttle()) == 2


def test_waiting_for_a_core_does_not_count_as_work() -> None:
    """Otherwise the cleaning would hardly progress where every core is busy."""
    machine = Machine(contention=1.0)
    throttle = machine.throttle()
    machine.queued = 0.9
    assert machine.works(1.0, throttle) == pytest.approx(1.6)


def test_the_throttle_ends_at_the_deadline() -> None:
    """The reason states it."""
    machine = Machine()
    throttle = machine.throttle(deadline=1)
    machine.passes(1)
    assert not throttle.may_continue()
    assert throttle.stop_reason is Reason.NO_TIME


def test_without_kernel_counters_a_process_always_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old kernel or one without PSI does not count waiting processes."""
    monkeypatch.setattr(throttle, "open", _absent, raising=False)
    first, second = seconds_stalled_for_disk(), seconds_stalled_for_disk()
    assert 0 < first <= second


def _absent(*_: object, **__: object) -> object:
    raise FileNotFoundError
