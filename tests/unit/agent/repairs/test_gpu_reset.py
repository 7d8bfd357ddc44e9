"""``gpu.reset`` on the stand-ins for the driver and for nvidia-smi, with the real pynvml and journal."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.driver import driver as standin
from tests.driver.driver import Card, Driver, cards
from tests.support.repairs import accepted, program
from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus
from trainmedic_agent.errors import CommandFailed, CommandRejected, CommandUnsupported, DriverAbsent, GpuError, GpuStuck
from trainmedic_agent.ports.gpus import Gpus
from trainmedic_agent.repairs import gpu_reset
from trainmedic_agent.repairs.gpu_reset import GpuResetExecutor
from trainmedic_agent.repairs.intents import IntentBook
from trainmedic_agent.repairs.timing import RepairTime

SMI = (sys.executable, str(Path(standin.__file__).with_name("nvidia_smi.py")))
FIRST, SECOND = (card.uuid for card in cards(2))


@pytest.fixture
def gpus(driver: Driver) -> Iterator[Gpus]:
    calls = TimeLimitedCalls()
    opened = TimeLimitedGpus(NvmlGpus(calls=calls), calls)
    yield opened
    opened.close()


@pytest.fixture
def reset(gpus: Gpus, intents: IntentBook) -> Callable[..., Mapping[str, Any]]:
    """Carry out the command."""

    def perform(gpu: str | None = "0", **more: Any) -> Mapping[str, Any]:
        return GpuResetExecutor(gpus, intents, SMI).perform(accepted("gpu.reset", gpu=gpu, **more))

    return perform


def test_a_broken_gpu_is_reset_and_read_afterwards(driver: Driver, gpus: Gpus, reset: Callable[..., Any]) -> None:
    """The agent closes NVML for it, or the reset would be refused, and sees that this one's limit may be forgotten."""
    driver.ask_for(0, 1)
    driver.ecc(0, 3, 2)
    sessions = [gpus.power(uuid).session for uuid in (FIRST, SECOND)]
    refused = subprocess.run([*SMI, "--gpu-reset", "-i", FIRST], capture_output=True, text=True, check=False)
    assert "in use by another client" in refused.stdout
    assert reset() == {
        "gpu": FIRST,
        "recovery_action_before": "reset",
        "recovery_action": "none",
        "energy_restarted": True,
        "resumed": False,
    }
    assert driver.resets() == [FIRST]
    assert [gpus.power(uuid).session == before for uuid, before in zip((FIRST, SECOND), sessions, strict=True)] == [
        False,
        True,
    ]


def test_a_gpu_that_a_process_uses_is_not_reset(driver: Driver, reset: Callable[..., Any]) -> None:
    """The refusal counts the processes; those on another GPU do not matter."""
    driver.occupy(0, 4711, 4712)
    with pytest.raises(CommandFailed, match=r"2 processes use GPU-00000000.*4711, 4712") as failed:
        reset()
    assert failed.value.output["processes"] == 2
    assert driver.resets() == []
    reset(SECOND, command_id="c2")
    assert driver.resets() == [SECOND]


def test_all_gpus_of_a_node_are_reset_together(driver: Driver, gpus: Gpus, reset: Callable[..., Any]) -> None:
    """One call resets them, and it is not repeated after a restart of the agent."""
    driver.ask_for(1, 1)
    output = reset(None)
    assert [one["gpu"] for one in output["gpus"]] == [FIRST, SECOND]
    assert [one["recovery_action_before"] for one in output["gpus"]] == ["none", "reset"]
    assert all(one["energy_restarted"] for one in output["gpus"])
    assert reset(None, resumed=True)["resumed"] is True
    assert driver.resets() == [FIRST, SECOND]


def test_no_gpu_of_a_node_is_reset_while_one_is_used_or_lost(
    driver: Driver, gpus: Gpus, reset: Callable[..., Any]
) -> None:
    """Nvidia-smi would reset the lost one too, whatever uses it."""
    driver.occupy(1, 4711)
    with pytest.raises(CommandFailed, match=r"1 processes use GPU-00000001"):
        reset(None)
    driver.occupy(1)
    driver.lose(1)
    with pytest.raises(GpuError):
        gpus.read(SECOND)
    with pytest.raises(CommandFailed, match="not every GPU can be checked, so none is reset: "):
        reset(None, command_id="c2")
    assert driver.resets() == []


def test_a_failure_of_a_reset_of_all_gpus_says_nothing_about_single_gpus(
    driver: Driver, reset: Callable[..., Any]
) -> None:
    driver.next_reset("refused")
    with pytest.raises(CommandFailed, match=f"nvidia-smi did not reset all of {FIRST}, {SECOND}: .*Permissions"):
        reset(None)


def test_a_gpu_whose_processes_are_unknown_is_not_reset(driver: Driver, reset: Callable[..., Any]) -> None:
    """A question that fails is no answer."""
    driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", standin.TIMEOUT, gpu=0)
    with pytest.raises(CommandFailed, match="unknown whether processes use"):
        reset()
    driver.heal()
    driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", standin.NOT_SUPPORTED, gpu=0)
    with pytest.raises(CommandUnsupported, match="does not report its processes"):
        reset(command_id="c2")
    with pytest.raises(CommandFailed, match=r"does not report its processes.*it may have been done before"):
        reset(command_id="c2", resumed=True)
    with pytest.raises(CommandFailed, match=r"there is no GPU.*it may have been done before"):
        reset("7", command_id="c2", resumed=True)
    with pytest.raises(CommandRejected, match="there is no GPU"):
        reset("7", command_id="c3")
    assert driver.resets() == []


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("refused", "nvidia-smi did not reset .*Insufficient Permissions"),
        ("useless", "still asks for reset"),
        ("fatal", "does not answer since"),
    ],
)
def test_a_reset_that_does_not_help_is_not_a_success(
    driver: Driver, reset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, how: str, told: str
) -> None:
    """This holds whatever nvidia-smi reports."""
    monkeypatch.setattr(RepairTime, "left", lambda _: 0.0 if driver.resets() else 60.0)
    driver.ask_for(0, 1)
    driver.next_reset(how)
    with pytest.raises(CommandFailed, match=told):
        reset()


def test_a_reset_before_a_restart_of_the_agent_is_not_repeated(
    driver: Driver, gpus: Gpus, intents: IntentBook, reset: Callable[..., Any]
) -> None:
    """The energy counter shows it. Without one, an unused GPU is reset again."""
    reset()
    assert reset(resumed=True)["resumed"] is True
    assert driver.resets() == [FIRST]


def test_a_card_without_an_energy_counter_claims_less(make_driver: Callable[..., Driver], intents: IntentBook) -> None:
    """No unobserved evidence is reported."""
    make_driver((Card(uuid="GPU-a", counts_energy=False),))
    gpus = NvmlGpus()
    output = GpuResetExecutor(gpus, intents, SMI).perform(accepted("gpu.reset", gpu="GPU-a"))
    assert "energy_restarted" not in output
    gpus.close()


def test_other_calls_are_refused_during_a_reset_and_work_afterwards(gpus: Gpus) -> None:
    """They do not wait, so that no other GPU counts as stuck."""
    gpus.inventory()
    began, may_end = threading.Event(), threading.Event()

    def act() -> str:
        began.set()
        may_end.wait(60)
        return "done"

    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(gpus.while_closed([FIRST], act)))
    thread.start()
    began.wait(60)
    with pytest.raises(DriverAbsent, match=f"while {FIRST} is reset"):
        gpus.read(SECOND)
    assert gpus.inventory().gpus == ()
    may_end.set()
    thread.join(60)
    assert results == ["done"]
    assert len(gpus.inventory().gpus) == 2


def test_invalid_commands_are_rejected(gpus: Gpus, intents: IntentBook, tmp_path: Path) -> None:
    """Each rejection has its reason."""
    executor = GpuResetExecutor(gpus, intents, SMI)
    for wrong, told in (
        (accepted("gpu.reset", gpu=" "), "names no GPU"),
        (accepted("gpu.reset", gpu="7"), "there is no GPU '7'"),
        (accepted("gpu.reset", gpu="0", force=True), "does not know 'force'"),
        (accepted("gpu.reset", gpu="0", undo_of="c0"), "has no undo"),
    ):
        with pytest.raises(CommandRejected, match=told):
            executor.perform(wrong)
    with pytest.raises(CommandUnsupported, match="is not on this machine"):
        GpuResetExecutor(gpus, intents, ("no-nvidia-smi",)).perform(accepted("gpu.reset", gpu="0"))
    silent = program(tmp_path / "smi", "exit 3")
    with pytest.raises(CommandFailed, match="exit code 3"):
        GpuResetExecutor(gpus, intents, (str(silent),)).perform(accepted("gpu.reset", "c2", gpu="0"))


def test_a_reset_that_may_still_happen_is_unknown(
    gpus: Gpus, intents: IntentBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nvidia-smi, or the closing of NVML, does not end in time."""
    slow = (str(program(tmp_path / "smi", "exec sleep 60")),)
    monkeypatch.setattr(gpu_reset, "_SMI_SECONDS", 0.2)
    executor = GpuResetExecutor(gpus, intents, slow)
    with pytest.raises(CommandFailed, match="it may still take effect") as failed:
        executor.perform(accepted("gpu.reset", gpu="0"))
    assert failed.value.output["may_be_done"] is True
    monkeypatch.setattr(gpus, "while_closed", lambda *_: (_ for _ in ()).throw(GpuStuck("the driver is stuck")))
    with pytest.raises(CommandFailed, match="may still be reset: the driver is stuck") as failed:
        executor.perform(accepted("gpu.reset", "c2", gpu="0"))
    assert failed.value.output == {"may_be_done": True}


def test_a_reset_is_not_started_after_its_deadline(driver: Driver, gpus: Gpus, reset: Callable[..., Any]) -> None:
    """NVML may be closed long after the reply."""
    with pytest.raises(CommandFailed, match="it was not begun"):
        reset(seconds=0)
    assert driver.resets() == []


def test_a_started_reset_that_cannot_be_repeated_is_unknown(
    driver: Driver, gpus: Gpus, intents: IntentBook, reset: Callable[..., Any]
) -> None:
    """The earlier process may have reset it."""
    intents.keep("c1", {}, utc_now())
    driver.occupy(0, 4711)
    with pytest.raises(CommandFailed, match="1 processes use") as failed:
        reset(resumed=True)
    assert failed.value.output["may_be_done"] is True
    driver.occupy(0)
    with pytest.raises(CommandFailed, match=r"is not on this machine.*it may have been done before"):
        GpuResetExecutor(gpus, intents, ("no-nvidia-smi",)).perform(accepted("gpu.reset", gpu="0", resumed=True))
    with pytest.raises(CommandFailed, match="does not know 'force'; it may have been done before"):
        reset(resumed=True, force=True)
