"""The agent's metrics: what a scrape shows, and what it never does."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.driver import driver as standin
from tests.driver.driver import Card, Driver, cards
from tests.support.programs import eventually
from trainmedic_agent import exporter as exporters
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.exporter import AgentCollector, Exporter
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.ports.gpus import Gpus
from trainmedic_agent.power.caps import GpuPowerState, PowerBaseline, PowerCap
from trainmedic_server.errors import ConfigurationError

FIRST, SECOND = (card.uuid for card in cards(2))
NAME = "NVIDIA H100 80GB HBM3"
ABOUT = {"node": "n1", "version": "1", "policy": "none"}

Shown = dict[tuple[str, frozenset[tuple[str, str]]], float]


Collectors = Callable[..., AgentCollector]


@pytest.fixture
def collector(gpus: NvmlGpus, gpu_record: GpuRecord) -> Collectors:
    def make(
        power: dict[str, GpuPowerState] | None = None, counters: AgentCounters | None = None, read: Gpus = gpus
    ) -> AgentCollector:
        return AgentCollector(read, lambda: power or {}, counters or AgentCounters(), ABOUT, gpu_record)

    return make


def scrape(collected: AgentCollector) -> Shown:
    """One scrape, through the text format and back."""
    registry = CollectorRegistry()
    registry.register(collected)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def of(shown: Shown, name: str, **labels: str) -> float | None:
    """The value of the only series of that name with these labels; None where there is none."""
    found = [value for (one, given), value in shown.items() if one == name and labels.items() <= dict(given).items()]
    assert len(found) <= 1
    return found[0] if found else None


def test_every_gpu_has_its_metrics_with_index_name_and_uuid(
    driver: Driver, gpus: NvmlGpus, collector: Collectors
) -> None:
    """Under the names that the alert rules read."""
    driver.load(1, 0.5)
    driver.fill(1, 40 << 30)
    driver.set_watts(1, 560)
    driver.heat(1, 71)
    shown = scrape(collector())
    where = {"gpu_id": "1", "gpu_name": NAME, "uuid": SECOND}
    expected = {
        "gpu_utilization_percent": 50,
        "gpu_memory_used_bytes": 40 << 30,
        "gpu_memory_total_bytes": 80 << 30,
        "gpu_temperature_celsius": 71,
        "gpu_memory_temperature_celsius": 77,
        "gpu_power_usage_watts": 385,
        "gpu_power_limit_watts": 560,
        "gpu_power_default_limit_watts": 700,
        "gpu_power_min_limit_watts": 200,
        "gpu_power_max_limit_watts": 700,
        "gpu_sm_clock_hertz": 1.98e9,
        "gpu_mig_enabled": 0,
    }
    assert {name: of(shown, name, **where) for name in expected} == expected
    assert {dict(labels)["gpu_id"] for name, labels in shown if name == "gpu_temperature_celsius"} == {"0", "1"}


def test_throttle_reasons_errors_and_xids_are_reported(driver: Driver, gpus: NvmlGpus, collector: Collectors) -> None:
    """Every reason has its series, so that its end is visible."""
    gpus.inventory()
    driver.heat(0, 92)
    driver.ecc(0, 5, 2)
    driver.xid(0, 94)
    shown = scrape(collector())
    assert of(shown, "gpu_throttle_reason", uuid=FIRST, reason="hw_thermal_slowdown") == 1
    assert of(shown, "gpu_throttle_reason", uuid=FIRST, reason="sw_power_cap") == 0
    assert of(shown, "gpu_throttle_reason", uuid=SECOND, reason="hw_thermal_slowdown") == 0
    assert of(shown, "gpu_ecc_errors_total", uuid=FIRST, type="uncorrected") == 2
    assert of(shown, "gpu_xid_errors_total", uuid=FIRST, xid="94") == 1
    assert of(shown, "gpu_last_xid", uuid=FIRST) == 94
    assert of(shown, "gpu_last_xid", uuid=SECOND) is None


def test_a_failed_reading_is_left_out_and_counted(
    driver: Driver, gpus: NvmlGpus, monkeypatch: pytest.MonkeyPatch, collector: Collectors
) -> None:
    """An unknown value is not zero; the other GPU's stays."""
    monkeypatch.setattr(exporters, "_REUSED_SECONDS", 0)
    driver.fail("nvmlDeviceGetUtilizationRates", standin.UNKNOWN, gpu=0)
    collected = collector()
    scrape(collected)
    shown = scrape(collected)
    assert of(shown, "gpu_utilization_percent", uuid=FIRST) is None
    assert of(shown, "gpu_reading_errors_total", uuid=FIRST, reading="utilization") == 2
    assert of(shown, "gpu_utilization_percent", uuid=SECOND) == 0
    assert of(shown, "gpu_temperature_celsius", uuid=FIRST) == 38


def test_a_lost_gpu_does_not_affect_others(driver: Driver, gpus: NvmlGpus, collector: Collectors) -> None:
    """It has no series, and is counted as missing."""
    gpus.inventory()
    driver.lose(0)
    collected = collector()
    shown = scrape(collected)
    assert of(shown, "gpu_temperature_celsius", uuid=FIRST) is None
    assert of(shown, "gpu_temperature_celsius", uuid=SECOND) == 38
    assert of(shown, "gpu_reading_errors_total", uuid=FIRST, reading="all") == 1


def test_a_reading_that_a_card_does_not_support_has_no_series(
    make_driver: Callable[..., Driver], collector: Collectors
) -> None:
    """This is no error either."""
    make_driver((Card(uuid="GPU-a", min_watts=0, mig=None),))
    gpus = NvmlGpus()
    shown = scrape(collector(read=gpus))
    gpus.close()
    assert of(shown, "gpu_power_limit_watts") is None
    assert of(shown, "gpu_mig_enabled") is None
    assert of(shown, "gpu_power_usage_watts") == 70
    assert not [name for name, _ in shown if name == "gpu_reading_errors_total"]


def test_the_agent_reports_on_itself(driver: Driver, gpus: NvmlGpus, collector: Collectors) -> None:
    """The metrics are caps, leases, pending undos, commands, faults, and the connection to Redis."""
    counters = AgentCounters()
    counters.commands.add(("gpu.power_limit", "applied"))
    counters.commands.add(("gpu.power_limit", "applied"))
    counters.loop_errors.add("disk")
    before = scrape(collector(counters=counters))
    assert of(before, "trainmedic_agent_redis_connected") == 0
    counters.redis_answered_at = time.time()
    cap = PowerCap("a", 560_000, 1700000300.0, 300.0, 700_000, 560_000)
    power = {
        FIRST: GpuPowerState(PowerBaseline(700_000, 560_000, "s"), (cap,)),
        SECOND: GpuPowerState(PowerBaseline(700_000, 560_000, "s"), ()),
    }
    shown = scrape(collector(power, counters))
    assert of(shown, "trainmedic_agent_info", node="n1", driver="570.86.15") == 1
    assert of(shown, "trainmedic_agent_redis_connected") == 1
    assert of(shown, "trainmedic_agent_commands_total", action="gpu.power_limit", status="applied") == 2
    assert of(shown, "trainmedic_agent_loop_errors_total", loop="disk") == 1
    assert of(shown, "trainmedic_agent_power_caps", uuid=FIRST) == 1
    assert of(shown, "trainmedic_agent_power_lease_end_timestamp_seconds", uuid=FIRST) == 1700000300
    assert of(shown, "trainmedic_agent_power_owed", uuid=FIRST) == 0
    assert of(shown, "trainmedic_agent_power_owed", uuid=SECOND) == 1
    power[FIRST] = GpuPowerState(PowerBaseline(700_000, 700_000, "s", pending_mw=560_000), (cap,))
    assert of(scrape(collector(power, counters)), "trainmedic_agent_power_owed", uuid=FIRST) == 1


def test_a_hanging_driver_costs_the_gpus_but_not_the_scrape(
    driver: Driver, gpus: NvmlGpus, monkeypatch: pytest.MonkeyPatch, collector: Collectors
) -> None:
    """The agent's own metrics are reported, and a limit can still be set on the other GPU."""
    monkeypatch.setattr(exporters, "_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(exporters, "_REUSED_SECONDS", 0)
    collected = collector()
    scrape(collected)
    driver.fail("nvmlDeviceGetUtilizationRates", gpu=0, hang=True, times=1)
    hanging = threading.Thread(daemon=True, target=scrape, args=(collected,))
    hanging.start()
    eventually(lambda: driver.is_tripped("nvmlDeviceGetUtilizationRates"), 60, "the driver hangs", every=0.005)
    shown = scrape(collected)
    gpus.set_power_limit(SECOND, 400_000)
    assert hanging.is_alive()
    assert of(shown, "trainmedic_agent_info") == 1
    assert of(shown, "trainmedic_agent_late_scrapes_total") == 1
    assert not [name for name, _ in shown if name == "gpu_temperature_celsius"]
    driver.heal()
    hanging.join(60)


def test_late_scrapes_of_several_threads_are_all_counted(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, collector: Collectors
) -> None:
    """Threads switch at each instruction of the exporter here."""
    monkeypatch.setattr(exporters, "_WAIT_SECONDS", 0)
    counters = AgentCounters()
    collected = collector(counters=counters)

    def switch(frame: FrameType, event: str, argument: object) -> Any:
        if "exporter.py" not in frame.f_code.co_filename and "counters.py" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            time.sleep(0.0002)
        return switch

    driver.fail("nvmlDeviceGetUtilizationRates", gpu=0, hang=True, times=1)
    hanging = threading.Thread(daemon=True, target=scrape, args=(collected,))
    hanging.start()
    eventually(lambda: driver.is_tripped("nvmlDeviceGetUtilizationRates"), 60, "the driver hangs", every=0.005)
    threading.settrace(switch)
    late = [threading.Thread(target=scrape, args=(collected,)) for _ in range(8)]
    try:
        for thread in late:
            thread.start()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]  # as the documentation has it
    for thread in late:
        thread.join(60)
    assert hanging.is_alive()
    assert of(scrape(collected), "trainmedic_agent_late_scrapes_total") == 9
    driver.heal()
    hanging.join(60)


def test_a_scrape_shows_one_reading_throughout(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, collector: Collectors
) -> None:
    """Another scrape that reads while this one is written does not change its other half."""
    monkeypatch.setattr(exporters, "_REUSED_SECONDS", 0)
    collected = collector()
    families = collected.collect()
    next(families)
    driver.lose(0)
    eventually(lambda: of(scrape(collected), "trainmedic_agent_gpus_missing") == 1, 60, "a GPU is missing", every=0.005)
    missing = next(family for family in families if family.name == "trainmedic_agent_gpus_missing")
    assert [sample.value for sample in missing.samples] == [0]


def test_scrapers_share_a_reading(driver: Driver, gpus: NvmlGpus, collector: Collectors) -> None:
    """Two Prometheus servers ask the driver once."""
    driver.fail("nvmlDeviceGetUtilizationRates", standin.UNKNOWN, gpu=0)
    collected = collector()
    scrape(collected)
    assert of(scrape(collected), "gpu_reading_errors_total", uuid=FIRST, reading="utilization") == 1


def test_the_endpoint_answers_over_http_and_reports_when_it_cannot(
    driver: Driver, gpus: NvmlGpus, collector: Collectors
) -> None:
    """It picks a free port; a port in use is an error with a remedy."""
    served = Exporter(collector(), "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=60) as reply:
            assert b"gpu_temperature_celsius" in reply.read()
        with pytest.raises(ConfigurationError, match="--exporter-port"):
            Exporter(collector(), "127.0.0.1", served.port)
    finally:
        served.close()


def test_a_scrape_may_ask_for_some_metrics_by_name(driver: Driver, gpus: NvmlGpus, collector: Collectors) -> None:
    """Prometheus does so with ``params: {name[]: [...]}``."""
    served = Exporter(collector(), "127.0.0.1", 0)
    asked = "name[]=gpu_temperature_celsius&name[]=process_open_fds"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics?{asked}", timeout=60) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
    finally:
        served.close()
    assert {family.name: len(family.samples) for family in families} == {
        "gpu_temperature_celsius": 2,
        "process_open_fds": 1,
    }
