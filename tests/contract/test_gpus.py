"""The port of the GPUs, on NVML: the real pynvml, and the stand-in for the driver that it loads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.driver import driver as standin
from tests.driver.driver import SET_LIMIT, Card, Driver, cards
from tests.support.programs import PYTHON_PATH, eventually
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus
from trainmedic_agent.errors import DriverAbsent, GpuAbsent, GpuError, GpuFailure, GpuLost, NoPermission, NotSupported
from trainmedic_agent.ports.gpus import EccErrors, GpuReading, Gpus

FIRST, SECOND = (card.uuid for card in cards(2))


@pytest.fixture(params=["direct", "time-limited"])
def gpus(driver: Driver, request: pytest.FixtureRequest) -> Iterator[Gpus]:
    """By themselves, and as the agent uses them: with every call in a thread that can be spared."""
    calls = TimeLimitedCalls()
    opened = NvmlGpus() if request.param == "direct" else TimeLimitedGpus(NvmlGpus(calls=calls), calls)
    yield opened
    opened.close()


# --- who is there -----------------------------------------------------------------------------------------


def test_the_gpus_are_listed_with_their_identifiers(gpus: Gpus) -> None:
    """Each has index, UUID, name and PCI address, and the driver's version."""
    inventory = gpus.inventory()
    assert [(one.index, one.uuid, one.pci_address) for one in inventory.gpus] == [
        (0, FIRST, "0000:18:00.0"),
        (1, SECOND, "0000:20:00.0"),
    ]
    assert (inventory.gpus[0].name, inventory.driver, inventory.problems) == ("NVIDIA H100 80GB HBM3", "570.86.15", ())


@pytest.mark.parametrize(
    "name",
    [
        "1",
        SECOND,
        SECOND.upper(),
        SECOND.removeprefix("GPU-"),
        "00000000:20:00.0",
        "0000:20:00.0",
        "0000:20:00",
        "20:00.0",
        f" {SECOND} ",
    ],
)
def test_a_gpu_is_found_by_every_name_that_exporters_use(gpus: Gpus, name: str) -> None:
    """UUID in any case and without its prefix; PCI address with a domain of four digits, eight or none; index."""
    assert gpus.find(name).uuid == SECOND


def test_a_pci_address_in_upper_case_is_the_same(make_driver: Callable[..., Driver]) -> None:
    """lspci and NVML write it differently."""
    make_driver((Card(uuid="GPU-a", pci="0001:af:00.0"),))
    gpus = NvmlGpus()
    assert [gpus.find(name).uuid for name in ("0001:AF:00.0", "00000001:af:00.0")] == ["GPU-a", "GPU-a"]
    with pytest.raises(GpuAbsent):
        gpus.find("0000:af:00.0")
    gpus.close()


@pytest.mark.parametrize("name", ["2", "-1", "GPU-ffffffff", "0000:99:00.0", "0000:zz:00.0", "", "²"])
def test_an_unknown_gpu_name_is_rejected_with_the_known_ones(gpus: Gpus, name: str) -> None:
    """Nothing is ever guessed."""
    with pytest.raises(GpuAbsent, match=f"0 .{FIRST}., 1 .{SECOND}."):
        gpus.find(name)


def test_a_mig_instance_has_no_power_limit_of_its_own(gpus: Gpus) -> None:
    """Its UUID is rejected with advice; capping its GPU would cap the other instances too."""
    with pytest.raises(NotSupported, match="MIG instance"):
        gpus.find("MIG-0c757cd7-e942-5726-a0b8-0e8fb7067135")


def test_the_processes_on_a_gpu_are_reported(gpus: NvmlGpus, driver: Driver) -> None:
    """By their ids on the node; none if nothing computes, and GpuLost if it is unknown."""
    assert gpus.processes(FIRST) == ()
    driver.occupy(0, 4711, 4712)
    assert gpus.processes(FIRST) == (4711, 4712)
    assert gpus.processes(SECOND) == ()
    driver.lose(0)
    with pytest.raises(GpuLost):
        gpus.processes(FIRST)


# --- power --------------------------------------------------------------------------------------------------


def test_a_power_limit_is_read_back_with_its_bounds(driver: Driver, gpus: Gpus) -> None:
    """In milliwatts; the other GPU keeps its own."""
    driver.load(1, 1.0)
    gpus.set_power_limit(SECOND, 420_000)
    power = gpus.power(SECOND)
    assert (power.limit_mw, power.enforced_mw, power.draw_mw) == (420_000, 420_000, 420_000)
    assert (power.default_mw, power.min_mw, power.max_mw) == (700_000, 200_000, 700_000)
    assert gpus.power(FIRST).limit_mw == 700_000
    assert [(call.gpu, call.watts) for call in driver.sets()] == [(1, 420)]


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        (standin.NOT_SUPPORTED, NotSupported, "does not support this"),
        (standin.NO_PERMISSION, NoPermission, "root"),
        (standin.GPU_IS_LOST, GpuLost, "no longer responds"),
        (standin.DRIVER_NOT_LOADED, DriverAbsent, "not loaded"),
        (standin.TIMEOUT, GpuFailure, "Timeout"),
        (standin.UNKNOWN, GpuFailure, "999"),
        (12345, GpuFailure, "12345"),
    ],
)
def test_every_driver_error_is_one_of_ours(
    driver: Driver, gpus: Gpus, code: int, error: type[GpuError], says: str
) -> None:
    """Each names the GPU and the problem, also for unknown codes."""
    driver.fail(SET_LIMIT, code, times=1)
    with pytest.raises(error, match=says):
        gpus.set_power_limit(FIRST, 420_000)
    gpus.set_power_limit(FIRST, 420_000)


def test_a_card_without_power_management_reports_it(make_driver: Callable[..., Driver]) -> None:
    """vGPUs and some workstation cards have none; their other readings are available."""
    make_driver((Card(uuid="GPU-a", min_watts=0),))
    gpus = NvmlGpus()
    with pytest.raises(NotSupported):
        gpus.power("GPU-a")
    reading = gpus.read("GPU-a")
    assert (reading.power_limit_mw, reading.power_default_mw, reading.temperature_celsius) == (None, None, 38)
    assert reading.unread == {}
    gpus.close()


# --- readings -----------------------------------------------------------------------------------------------


def test_a_reading_has_everything_that_the_card_reports(driver: Driver, gpus: Gpus) -> None:
    """This is power, temperature, memory, clocks, throttle reasons and errors."""
    gpus.inventory()
    driver.load(0, 0.9)
    driver.fill(0, 40 << 30)
    driver.set_watts(0, 560)
    driver.heat(0, 91)
    driver.ecc(0, 3, 1)
    driver.xid(0, 79)
    driver.xid(0, 48)
    driver.throttle(0, 0x80)
    reading = gpus.read(FIRST)
    assert (reading.utilization_percent, reading.memory_utilization_percent) == (90, 45)
    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (40 << 30, 80 << 30)
    assert (reading.temperature_celsius, reading.memory_temperature_celsius, reading.slowdown_celsius) == (91, 97, 89)
    assert (reading.power_draw_mw, reading.power_limit_mw, reading.power_default_mw) == (560_000, 560_000, 700_000)
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz, reading.is_mig) == (1980, 2619, False)
    assert reading.throttle_reasons == (
        "sw_power_cap",
        "hw_slowdown",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
    )
    assert reading.ecc == EccErrors(3, 1, 3, 1)
    assert (reading.last_xid, reading.unread) == (48, {})
    assert gpus.read(SECOND).last_xid is None
    assert (reading.recovery_action, reading.energy_mj is not None and reading.energy_mj >= 5e9) == ("none", True)


def test_xids_are_counted_by_gpu_and_code(driver: Driver, gpus: Gpus) -> None:
    """This includes a GPU that no longer answers: the Xids are its last message."""
    assert gpus.xids() == {}
    gpus.inventory()
    for code in (48, 48, 79):
        driver.xid(0, code)
    driver.lose(0)
    driver.xid(1, 31)
    assert gpus.xids() == {FIRST: {48: 2, 79: 1}, SECOND: {31: 1}}
    driver.unload()
    assert gpus.xids() == {FIRST: {48: 2, 79: 1}, SECOND: {31: 1}}


@pytest.mark.parametrize(("number", "name"), [(0, "none"), (1, "reset"), (4, "drain_and_reset"), (99, "unknown")])
def test_the_driver_reports_the_recovery_action_it_needs(driver: Driver, gpus: Gpus, number: int, name: str) -> None:
    """Numbers of later releases are reported as such."""
    driver.ask_for(0, number)
    assert gpus.read(FIRST).recovery_action == name


def test_an_older_driver_does_not_report_a_recovery_action(driver: Driver, gpus: Gpus) -> None:
    """This does not make the reading fail."""
    driver.ask_for(0, None)
    reading = gpus.read(FIRST)
    assert (reading.recovery_action, reading.unread) == (None, {})


def test_the_energy_counter_restarts_after_a_reset(driver: Driver, gpus: Gpus) -> None:
    """A reset is detected by it."""
    before = gpus.read(FIRST).energy_mj
    driver.reset(0)
    after = gpus.read(FIRST).energy_mj
    assert before is not None
    assert after is not None
    assert after < before


def test_a_failed_reading_does_not_affect_the_others(driver: Driver, gpus: Gpus) -> None:
    """It is omitted and named; what a card does not support is only omitted."""
    driver.fail("nvmlDeviceGetUtilizationRates", standin.UNKNOWN, gpu=0)
    driver.fail("nvmlDeviceGetTotalEccErrors", standin.NOT_SUPPORTED, gpu=0)
    driver.fail("nvmlDeviceGetPowerManagementDefaultLimit", standin.TIMEOUT, gpu=0)
    reading = gpus.read(FIRST)
    assert reading.unread == {"utilization": "Unknown Error", "power_default": "Timeout"}
    assert (reading.utilization_percent, reading.ecc, reading.power_default_mw) == (None, None, None)
    assert reading.temperature_celsius == 38
    assert gpus.read(SECOND).unread == {}


def test_a_failed_query_is_repeated(driver: Driver, gpus: Gpus) -> None:
    """Also for values that are constant while the driver is loaded and cached once they were read."""
    driver.fail("nvmlDeviceGetPowerManagementDefaultLimit", standin.TIMEOUT, times=1)
    assert gpus.read(FIRST).power_default_mw is None
    assert gpus.read(FIRST).power_default_mw == 700_000


def test_a_gpu_in_mig_mode_reports_what_it_can(make_driver: Callable[..., Driver]) -> None:
    """The driver has no utilisation for it; power and temperature are those of the whole GPU."""
    make_driver((Card(uuid="GPU-a", mig=True),))
    gpus = NvmlGpus()
    reading = gpus.read("GPU-a")
    assert (reading.is_mig, reading.utilization_percent, reading.power_limit_mw) == (True, None, 700_000)
    gpus.close()


@pytest.mark.parametrize(
    "renamed", ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetFieldValues"]
)
def test_an_older_driver_is_queried_through_its_own_functions(driver: Driver, gpus: Gpus, renamed: str) -> None:
    """Missing functions are replaced by older ones, or the reading is omitted."""
    driver.fail(renamed, 13)  # NVML_ERROR_FUNCTION_NOT_FOUND
    reading = gpus.read(FIRST)
    assert (reading.temperature_celsius, reading.memory_total_bytes, reading.unread) == (38, 80 << 30, {})


# --- what goes away and comes back ----------------------------------------------------------------------------


def test_a_lost_gpu_does_not_affect_the_others(driver: Driver, gpus: Gpus) -> None:
    """Calls to it report that it is lost until it answers again."""
    gpus.inventory()
    driver.lose(0)
    for ask in (gpus.power, gpus.read):
        with pytest.raises(GpuLost, match=FIRST):
            ask(FIRST)
    assert isinstance(gpus.read(SECOND), GpuReading)
    assert [one.index for one in gpus.inventory().gpus] == [1]
    assert FIRST in " ".join(gpus.inventory().problems)
    driver.lose(0, lost=False)
    assert gpus.power(FIRST).limit_mw == 700_000
    assert [one.index for one in gpus.inventory().gpus] == [0, 1]


def test_a_gpu_lost_at_the_agents_start_is_found_when_it_recovers(make_driver: Callable[..., Driver]) -> None:
    """NVML is opened again to look for it, at most once a minute."""
    driver = make_driver(2)
    driver.lose(1)
    clock = [0.0]
    gpus = NvmlGpus(lambda: clock[0])
    assert [one.uuid for one in gpus.inventory().gpus] == [FIRST]
    assert gpus.inventory().problems == ("GPU 1 does not respond: GPU is lost",)
    driver.lose(1, lost=False)
    assert len(gpus.inventory().gpus) == 1
    clock[0] = 61
    assert len(gpus.inventory().gpus) == 2
    gpus.close()


def test_a_gpu_keeps_its_name_when_the_one_before_it_is_lost(driver: Driver, gpus: Gpus) -> None:
    """Indices move up when the driver is reloaded; a limit never reaches another GPU."""
    assert gpus.find("1").uuid == SECOND
    driver.remove(0)
    driver.reload()
    assert gpus.find("0").uuid == SECOND
    gpus.set_power_limit(SECOND, 300_000)
    assert (driver.watts(0), driver.watts(1)) == (700, 300)
    with pytest.raises(GpuLost):
        gpus.find(FIRST)


def test_a_reloaded_driver_is_opened_again(driver: Driver, gpus: Gpus) -> None:
    """Queries are answered at once; the session shows that settings may be lost."""
    gpus.set_power_limit(FIRST, 420_000)
    before = gpus.power(FIRST)
    driver.reload()
    after = gpus.power(FIRST)
    assert (before.limit_mw, after.limit_mw) == (420_000, 700_000)
    assert before.session != after.session
    assert gpus.power(FIRST).session == after.session


def test_a_limit_is_not_set_twice_when_the_driver_is_reloaded(driver: Driver, gpus: Gpus) -> None:
    """Setting reports the reload; the caller then decides again whether to set."""
    gpus.inventory()
    driver.reload()
    with pytest.raises(DriverAbsent):
        gpus.set_power_limit(FIRST, 420_000)
    assert driver.sets() == []
    gpus.set_power_limit(FIRST, 420_000)
    assert driver.watts(0) == 420


def test_the_session_of_a_gpu_changes_after_it_was_lost(driver: Driver, gpus: Gpus) -> None:
    """It may have been reset; the session of the others stays."""
    first, second = gpus.power(FIRST).session, gpus.power(SECOND).session
    driver.lose(0)
    with pytest.raises(GpuLost):
        gpus.power(FIRST)
    driver.lose(0, lost=False)
    assert gpus.power(FIRST).session != first
    assert gpus.power(SECOND).session == second


def test_every_call_without_a_driver_reports_it(driver: Driver, gpus: Gpus) -> None:
    """Calls work once the driver is loaded."""
    driver.unload()
    assert gpus.inventory().gpus == ()
    assert "not loaded" in gpus.inventory().problems[0]
    for ask in (gpus.find, gpus.power, gpus.read):
        with pytest.raises(DriverAbsent):
            ask(FIRST)
    driver.reload()
    assert gpus.find("0").uuid == FIRST


def test_every_call_without_nvml_reports_it(tmp_path) -> None:
    """No driver was ever installed: the library cannot be loaded."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    program = "from trainmedic_agent.adapters.nvml_gpus import NvmlGpus; print(NvmlGpus().inventory().problems)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "driver is not installed" in done.stdout


def test_threads_read_and_set_at_once_while_the_driver_is_reloaded(driver: Driver, gpus: Gpus) -> None:
    """Each call answers or raises one of our errors, and afterwards everything works."""
    unexpected: list[BaseException] = []

    def ask(call: Callable[[], object]) -> None:
        for _ in range(150):
            try:
                call()
            except GpuError:
                pass
            except BaseException as error:
                unexpected.append(error)
                return

    calls: list[Callable[[], object]] = [
        lambda: gpus.read(FIRST),
        lambda: gpus.power(SECOND),
        lambda: gpus.set_power_limit(SECOND, 500_000),
        driver.reload,
        gpus.inventory,
    ]
    threads = [threading.Thread(daemon=True, target=ask, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert unexpected == []
    gpus.inventory()  # the driver may have been loaded anew last of all; a limit is set once, and not tried again
    gpus.set_power_limit(SECOND, 400_000)
    assert gpus.power(SECOND).limit_mw == 400_000


def test_a_slow_reading_does_not_delay_a_limit(driver: Driver, gpus: Gpus) -> None:
    """The driver is slow for one GPU; the limit of another is set during this time."""
    gpus.inventory()
    driver.fail("nvmlDeviceGetUtilizationRates", gpu=0, hang=True, times=1)
    reading = threading.Thread(daemon=True, target=gpus.read, args=(FIRST,))
    reading.start()
    eventually(lambda: driver.is_tripped("nvmlDeviceGetUtilizationRates"), 60, "the driver hangs", every=0.005)
    gpus.set_power_limit(SECOND, 400_000)
    assert reading.is_alive()
    driver.heal()
    reading.join(60)
