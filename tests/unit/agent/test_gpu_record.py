"""The agent's record of its GPUs: what lasts, and what ends it. On the stand-in for the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.driver.driver import Card, Driver, cards
from trainmedic_agent import gpu_metrics
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.errors import GpuError, JournalUnavailable
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.journal import Journal
from trainmedic_agent.ports.gpus import Inventory

FIRST, SECOND = (card.uuid for card in cards(2))
RESET, NONE = 1, 0


class Agent:
    """As much of an agent as keeps a record: it can be started anew, on another start of the machine too."""

    def __init__(self, directory: Path, boot: str = "boot-1") -> None:
        self.directory = directory
        self.start(boot)

    def start(self, boot: str = "boot-1") -> None:
        self.journal = Journal(self.directory)
        self.record = GpuRecord(self.journal, boot)
        self.gpus = NvmlGpus()
        self.look()

    def stop(self) -> None:
        self.gpus.close()
        self.journal.close()

    def look(self) -> None:
        """As a scrape does."""
        inventory, readings = self.gpus.inventory(), []
        for info in inventory.gpus:
            with contextlib.suppress(GpuError):
                readings.append((info, self.gpus.read(info.uuid)))
        self.record.observe(inventory, readings, self.gpus.xids())

    def xids(self) -> dict[str, dict[int, int]]:
        return {gpu.info.uuid: dict(gpu.xids) for gpu in self.record.gpus() if gpu.xids}

    def missing(self) -> list[str]:
        return [gpu.info.uuid for gpu in self.record.gpus() if not gpu.is_present]


@pytest.fixture
def agent(driver: Driver, tmp_path: Path) -> Iterator[Agent]:
    started = Agent(tmp_path / "state")
    yield started
    started.stop()


def test_an_error_survives_a_later_one_and_an_agent_restart(driver: Driver, agent: Agent) -> None:
    """48 is followed by the clean-up code 45; neither that nor a restart of the agent ends it."""
    driver.xid(0, 48)
    driver.xid(0, 45)
    agent.look()
    agent.look()
    assert agent.xids() == {FIRST: {48: 1, 45: 1}}
    agent.stop()
    agent.start()
    driver.xid(0, 48)
    agent.look()
    assert agent.xids() == {FIRST: {48: 2, 45: 1}}


def test_errors_of_a_gpu_that_is_listed_later_count(agent: Agent) -> None:
    """The driver reports each only once, also of a GPU that did not respond when it was opened."""
    first, second = agent.gpus.inventory().gpus
    xids = {"GPU-late": {79: 1}, FIRST: {48: 1}}
    agent.record.observe(agent.gpus.inventory(), (), xids)
    late = replace(second, uuid="GPU-late")
    for _ in range(2):
        agent.record.observe(Inventory((first, late)), (), xids)
    assert agent.xids() == {FIRST: {48: 1}, "GPU-late": {79: 1}}


def test_a_missing_gpu_keeps_its_errors_and_is_reported(driver: Driver, agent: Agent) -> None:
    """79 is the last XID that a GPU reports."""
    driver.xid(0, 79)
    driver.lose(0)
    agent.look()  # in which a reading shows that it is lost
    agent.look()
    assert (agent.xids(), agent.missing()) == ({FIRST: {79: 1}}, [FIRST])
    agent.stop()
    driver.remove(0)
    agent.start()
    assert (agent.xids(), agent.missing()) == ({FIRST: {79: 1}}, [FIRST])


def test_a_reboot_ends_errors_and_reports_gpus_that_did_not_return(driver: Driver, agent: Agent) -> None:
    """A driver that lists one GPU fewer after a reboot has not been repaired."""
    driver.xid(0, 79)
    driver.xid(1, 48)
    agent.look()
    agent.stop()
    driver.remove(0)
    agent.start("boot-2")
    assert (agent.xids(), agent.missing()) == ({}, [FIRST])


@pytest.mark.parametrize("while_away", [False, True])
@pytest.mark.parametrize("sign", ["energy", "recovery action"])
def test_a_reset_ends_the_errors_of_its_gpu(
    make_driver: Callable[..., Driver], tmp_path: Path, while_away: bool, sign: str
) -> None:
    """Either sign shows it, even if the agent was down at the time; the other GPU keeps its own errors."""
    both = [Card(card.uuid, card.pci, counts_energy=sign == "energy") for card in cards(2)]
    driver = make_driver(both)
    for place in (0, 1):
        driver.ask_for(place, RESET if sign == "recovery action" else None)
    agent = Agent(tmp_path / "state")
    for place in (0, 1):
        driver.xid(place, 48)
    agent.look()
    if while_away:
        agent.stop()
    else:  # readings fail meanwhile
        driver.fail("nvmlDeviceGetTotalEnergyConsumption", 999)
        driver.fail("nvmlDeviceGetFieldValues", 999)
        agent.look()
        driver.heal()
    driver.reset(0)
    if while_away:
        agent.start()
    agent.look()
    assert agent.xids() == {SECOND: {48: 1}}
    agent.stop()


def test_nothing_else_ends_the_errors(driver: Driver, agent: Agent) -> None:
    """A failing reading and an unavailable driver do not."""
    driver.ask_for(0, RESET)
    driver.xid(0, 48)
    agent.look()
    driver.fail("nvmlDeviceGetTotalEnergyConsumption", 999, gpu=0)
    driver.fail("nvmlDeviceGetFieldValues", 999, gpu=0)
    agent.look()
    driver.heal()
    agent.look()
    driver.unload()
    agent.look()
    assert agent.missing() == [FIRST, SECOND]
    assert agent.xids() == {FIRST: {48: 1}}


def test_a_replacement_card_ends_the_wait_for_the_old_one(make_driver: Callable[..., Driver], tmp_path: Path) -> None:
    """A replaced GPU is not reported missing; a removed one is, until a user confirms the removal."""
    old, new = Card("GPU-old", "0000:18:00.0"), Card("GPU-new", "0000:18:00.0")
    other = Card("GPU-other", "0000:20:00.0")
    driver = make_driver((old, other, new))
    driver.remove(2)
    agent = Agent(tmp_path / "state")
    driver.xid(0, 48)
    agent.look()
    driver.remove(0)
    driver.remove(1)
    driver.remove(2, absent=False)
    driver.reload()
    agent.stop()
    agent.start()
    assert agent.missing() == ["GPU-other"]
    assert agent.xids() == {}
    assert agent.record.forget("GPU-other")
    assert not agent.record.forget("GPU-other")
    agent.look()
    agent.stop()
    agent.start()
    assert [gpu.info.uuid for gpu in agent.record.gpus()] == ["GPU-new"]
    agent.stop()


def test_an_unwritable_disk_loses_no_error(
    driver: Driver, agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is shown, and written later."""

    def full(*_: object) -> None:
        raise JournalUnavailable("no space")

    with monkeypatch.context() as patched:
        patched.setattr(agent.journal, "write", full)
        driver.xid(0, 48)
        agent.look()
        assert agent.xids() == {FIRST: {48: 1}}
        assert "cannot write" in caplog.text
    agent.look()
    agent.stop()
    agent.start()
    assert agent.xids() == {FIRST: {48: 1}}


@pytest.mark.parametrize(
    ("code", "asked_for", "action"),
    [
        (48, NONE, "reset_gpu"),
        (79, NONE, "restart_node"),
        (45, RESET, "none"),
        (31, NONE, "restart_program"),
        (9999, NONE, "ask"),
        (154, NONE, "none"),
        (154, RESET, "reset_gpu"),
        (154, 2, "restart_node"),
        (154, 3, "ask"),
        (154, None, "ask"),
    ],
)
def test_an_error_states_the_required_action(
    driver: Driver, agent: Agent, code: int, asked_for: int | None, action: str
) -> None:
    """The catalogue decides, or the driver's recovery action; unknown errors need a manual check."""
    driver.ask_for(0, asked_for)
    driver.xid(0, code)
    agent.look()
    samples = [one for family in gpu_metrics.record_families(agent.record.gpus()) for one in family.samples]
    (error,) = [one for one in samples if one.name == "gpu_xid_errors_total"]
    assert (error.labels["xid"], error.labels["action"], error.value) == (str(code), action, 1)


def test_forgetting_a_gpu_does_not_hide_another_gpus_unwritten_errors(
    driver: Driver, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise JournalUnavailable("no space")

    with monkeypatch.context() as patched:
        patched.setattr(agent.journal, "write", full)
        driver.xid(0, 48)
        agent.look()
    assert agent.record.forget(SECOND)
    agent.look()
    agent.stop()
    agent.start()
    assert agent.xids() == {FIRST: {48: 1}}
