"""A call to the driver that never comes back: what it costs, and whom. The real pynvml, and the stand-in's driver.

Nothing here depends on how long a call takes that does come back (`Hasty`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar
from unittest.mock import Mock

import pynvml
import pytest

from tests.driver.driver import SET_LIMIT, Driver, cards
from tests.support.programs import eventually
from tests.unit.agent.test_exporter import of, scrape
from trainmedic_agent.adapters import time_limited_gpus
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.adapters.nvml_session import DirectCalls
from trainmedic_agent.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.errors import GpuError, GpuFailure, GpuStuck
from trainmedic_agent.exporter import AgentCollector
from trainmedic_agent.facts.gpu import all_facts, presence
from trainmedic_agent.gpu_record import GpuRecord

T = TypeVar("T")
FIRST, SECOND = (card.uuid for card in cards(2))
POWER = "nvmlDeviceGetPowerManagementLimit"
HANDLE = "nvmlDeviceGetHandleByIndex_v2"


class Hasty(TimeLimitedCalls):
    """Gives up what the test says at once, and everything else never, so that a slow machine is nothing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()

    def run(self, key: str, function: Callable[[], T], timeout: float = 0.0) -> T:
        return super().run(key, function, 0.2 if key in self.keys else 120.0)


class Noting(TimeLimitedCalls):
    """Notes who was asked, and how long that was to be waited for; waits as long as it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, float]] = []

    def run(self, key: str, function: Callable[[], T], timeout: float = time_limited_gpus.CARD_SECONDS) -> T:
        self.asked.append((key, timeout))
        return super().run(key, function, 120.0)


@pytest.fixture
def calls() -> Hasty:
    return Hasty()


@pytest.fixture
def gpus(driver: Driver, calls: Hasty) -> Iterator[TimeLimitedGpus]:
    opened = TimeLimitedGpus(NvmlGpus(calls=calls), calls)
    yield opened
    driver.heal()
    eventually(calls.is_free, 60, "every call back")
    opened.close()


def threads() -> int:
    return sum(thread.name == "gpu-call" for thread in threading.enumerate())


def hang(driver: Driver, gpus: TimeLimitedGpus, calls: Hasty) -> None:
    """Calls to the first card do not come back, and somebody has found out."""
    gpus.inventory()
    driver.fail(POWER, gpu=0, hang=True)
    calls.keys.add(FIRST)
    with pytest.raises(GpuStuck):
        gpus.power(FIRST)
    calls.keys.clear()


def answers(gpus: TimeLimitedGpus, uuid: str) -> bool:
    try:
        return gpus.power(uuid).limit_mw > 0
    except GpuError:
        return False


def test_a_hanging_card_is_reported_as_stuck_and_the_others_answer(
    driver: Driver, gpus: TimeLimitedGpus, calls: Hasty
) -> None:
    """The error says what is wrong, for how long, and what to do; the other card's limits work."""
    hang(driver, gpus, calls)
    with pytest.raises(GpuStuck, match=f"{FIRST} is stuck: a driver call has not returned for .*dmesg"):
        gpus.set_power_limit(FIRST, 400_000)
    gpus.set_power_limit(SECOND, 420_000)
    assert driver.watts(1) == 420
    assert driver.sets(0) == []


def test_every_caller_after_the_first_is_answered_at_once(driver: Driver, gpus: TimeLimitedGpus, calls: Hasty) -> None:
    """However many call, the card costs no more threads."""
    hang(driver, gpus, calls)
    before = threads()
    for _ in range(100):
        with pytest.raises(GpuStuck):
            gpus.read(FIRST)
    assert threads() <= before
    assert calls.stuck() == {FIRST}


def test_a_card_whose_call_returns_works_again(driver: Driver, gpus: TimeLimitedGpus, calls: Hasty) -> None:
    """No restart is needed."""
    hang(driver, gpus, calls)
    driver.heal()
    eventually(lambda: answers(gpus, FIRST), 60, "the card")
    assert calls.stuck() == frozenset()
    assert threads() <= 3


def test_many_simultaneous_callers_cost_few_threads(driver: Driver, gpus: TimeLimitedGpus, calls: Hasty) -> None:
    """None of them knows yet that the card hangs; those beyond the limit are refused."""
    gpus.inventory()
    driver.fail(POWER, gpu=0, hang=True)
    calls.keys.add(FIRST)
    errors: list[GpuError] = []

    def ask() -> None:
        try:
            gpus.power(FIRST)
        except GpuError as error:
            errors.append(error)

    asking = [threading.Thread(daemon=True, target=ask) for _ in range(12)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(errors) == 12
    assert threads() <= time_limited_gpus._MOST_CALLS + time_limited_gpus._KEPT_IDLE


def test_a_card_that_hangs_while_the_driver_is_opened_does_not_block_others(
    driver: Driver, gpus: TimeLimitedGpus, calls: Hasty
) -> None:
    """An agent restarted because of it serves the rest; the card is reported among the problems."""
    driver.fail(HANDLE, gpu=0, hang=True)
    calls.keys.add("GPU 0")
    inventory = gpus.inventory()
    assert [info.uuid for info in inventory.gpus] == [SECOND]
    (problem,) = inventory.problems
    assert "GPU 0 is stuck" in problem
    gpus.set_power_limit(SECOND, 420_000)


def test_presence_and_facts_have_the_other_cards_and_name_the_stuck_one(
    driver: Driver, gpus: TimeLimitedGpus, calls: Hasty
) -> None:
    """The server sees which card it is."""
    hang(driver, gpus, calls)
    first, second = presence(gpus)["gpus"]
    assert "is stuck" in first["problem"]
    assert second["power_limit_watts"] == 700
    facts = all_facts(gpus)
    assert [gpu["uuid"] for gpu in facts["gpus"]] == [SECOND]
    assert "is stuck" in facts["gpu_problems"][0]


def test_the_exporter_shows_a_stuck_card_and_serves_the_others(
    driver: Driver, gpus: TimeLimitedGpus, calls: Hasty, gpu_record: GpuRecord
) -> None:
    """It is 1 for the stuck card and 0 for the other, whose readings are present."""
    hang(driver, gpus, calls)
    about = {"node": "n1", "version": "1", "policy": "none"}
    shown = scrape(AgentCollector(gpus, dict, AgentCounters(), about, gpu_record))
    assert of(shown, "gpu_present", uuid=FIRST) == 1
    assert of(shown, "trainmedic_agent_gpu_stuck", uuid=FIRST) == 1
    assert of(shown, "trainmedic_agent_gpu_stuck", uuid=SECOND) == 0
    assert of(shown, "trainmedic_agent_gpus_missing") == 1
    assert of(shown, "gpu_temperature_celsius", uuid=SECOND) == 38
    assert of(shown, "gpu_temperature_celsius", uuid=FIRST) is None


def test_a_driver_that_cannot_list_its_cards_is_reported_with_the_known_ones(
    driver: Driver, gpus: TimeLimitedGpus, calls: Hasty
) -> None:
    """Each card still answers for itself."""
    gpus.inventory()
    driver.fail("nvmlDeviceGetCount_v2", hang=True)
    calls.keys.add("NVIDIA's driver")
    inventory = gpus.inventory()
    assert [info.uuid for info in inventory.gpus] == [FIRST, SECOND]
    assert "NVIDIA's driver is stuck" in inventory.problems[-1]
    assert answers(gpus, FIRST)
    with pytest.raises(GpuStuck):
        gpus.find("0")


def test_opening_the_driver_has_its_own_time_limit(driver: Driver) -> None:
    """Whatever is queried first: waking eight cards takes longer than the time limit of one card."""
    calls = Noting()
    gpus = TimeLimitedGpus(NvmlGpus(calls=calls), calls)
    assert gpus.power(FIRST).limit_mw > 0
    assert calls.asked[0] == ("NVIDIA's driver", time_limited_gpus.DRIVER_SECONDS)
    assert calls.asked[-1] == (FIRST, time_limited_gpus.CARD_SECONDS)
    asked = len(calls.asked)
    gpus.power(SECOND)
    assert calls.asked[asked:] == [(SECOND, time_limited_gpus.CARD_SECONDS)]
    gpus.close()


def test_a_driver_is_not_closed_during_a_call(driver: Driver, gpus: TimeLimitedGpus, calls: Hasty) -> None:
    """The real library may crash then; the process ends anyway."""
    hang(driver, gpus, calls)
    gpus.close()
    driver.heal()
    eventually(lambda: answers(gpus, FIRST), 60, "the card")


def test_a_set_that_returns_late_is_noticed(driver: Driver, gpus: TimeLimitedGpus, calls: Hasty) -> None:
    """It may have taken effect: the caller reads the limit again."""
    gpus.inventory()
    driver.fail(SET_LIMIT, gpu=0, hang=True, after=True)
    calls.keys.add(FIRST)
    with pytest.raises(GpuStuck):
        gpus.set_power_limit(FIRST, 420_000)
    calls.keys.clear()
    driver.heal()
    eventually(lambda: answers(gpus, FIRST), 60, "the card")
    assert gpus.power(FIRST).limit_mw == 420_000


def test_a_call_for_which_no_thread_starts_is_not_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card is not reported as stuck afterwards."""
    calls = TimeLimitedCalls()
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(10):
            with pytest.raises(GpuFailure, match="no thread"):
                calls.run(FIRST, lambda: 1)
    assert calls.is_free()
    assert calls.run(FIRST, lambda: 1) == 1
    calls.dismiss()


def test_gpus_are_known_even_if_no_thread_starts(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presence and metrics lack only the readings, also if many processes leave no capacity for a thread."""
    gpus = TimeLimitedGpus(NvmlGpus(), calls := TimeLimitedCalls())
    assert len(gpus.inventory().gpus) == 2
    calls.dismiss()
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        inventory = gpus.inventory()
        assert len(inventory.gpus) == 2
        assert "no thread for a driver call" in inventory.problems[0]
        assert gpus.xids() == {}
        assert len(presence(gpus)["gpus"]) == 2
        gpus.close()
    gpus.close()


def test_all_parts_of_an_agent_may_wait_for_the_driver_at_once() -> None:
    """At the start, opening a driver takes seconds per card: no caller is told that it is stuck."""
    calls, opened = TimeLimitedCalls(), threading.Event()
    results: list[bool] = []
    parts = ("gpu", "facts", "health", "presence", "exporter", "log-news")
    asking = [
        threading.Thread(target=lambda: results.append(calls.run("the driver", opened.wait, 60.0)), name=name)
        for name in parts
    ]
    for thread in asking:
        thread.start()
    eventually(lambda: len(calls._under_way) + len(results) == len(parts), 60, "all calls", every=0.01)
    opened.set()
    for thread in asking:
        thread.join(60)
    assert results == [True] * len(parts)
    calls.dismiss()


@pytest.mark.parametrize("key", ["GPU 1", SECOND])
def test_nvml_is_closed_if_no_thread_for_its_opening_can_be_started(
    make_driver: Callable[..., Driver], key: str
) -> None:
    """Otherwise the agent would be a client that prevents each reset."""

    class Exhausted(DirectCalls):
        exhausted = key

        def run(self, key: str, function: Callable[[], T]) -> T:
            if key == self.exhausted:
                raise GpuFailure("no thread for a driver call can be started")
            return super().run(key, function)

    make_driver(2)
    calls = Exhausted()
    gpus = NvmlGpus(calls=calls)
    assert gpus.inventory().problems == ("no thread for a driver call can be started",)
    calls.exhausted = ""
    assert len(gpus.inventory().gpus) == 2
    gpus.close()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
