"""Prometheus metrics of GPU readings and records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from trainmedic_agent.gpu_record import KnownGpu
from trainmedic_agent.ports.gpus import THROTTLE_REASONS, GpuInfo, GpuReading
from trainmedic_logs.domain.xids import xid

LABELS = ("gpu_id", "gpu_name", "uuid")

Reading = tuple[GpuInfo, GpuReading]


class _Gauge(Struct, frozen=True):
    name: str
    help: str
    field: str
    convert: Callable[[Any], float] = float


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


def _hertz(megahertz: int) -> float:
    return megahertz * 1_000_000


_GAUGES = (
    _Gauge("gpu_utilization_percent", "Time in which a kernel ran.", "utilization_percent"),
    _Gauge("gpu_memory_utilization_percent", "Time in which memory was read or written.", "memory_utilization_percent"),
    _Gauge("gpu_memory_used_bytes", "Memory in use.", "memory_used_bytes"),
    _Gauge("gpu_memory_total_bytes", "Memory of the card.", "memory_total_bytes"),
    _Gauge("gpu_temperature_celsius", "Temperature of the chip.", "temperature_celsius"),
    _Gauge("gpu_memory_temperature_celsius", "Temperature of the memory.", "memory_temperature_celsius"),
    _Gauge("gpu_slowdown_temperature_celsius", "Temperature at which the chip throttles.", "slowdown_celsius"),
    _Gauge("gpu_power_usage_watts", "Power drawn.", "power_draw_mw", _watts),
    _Gauge("gpu_power_limit_watts", "Effective power limit.", "power_enforced_mw", _watts),
    _Gauge("gpu_power_default_limit_watts", "The card's default power limit.", "power_default_mw", _watts),
    _Gauge("gpu_power_min_limit_watts", "The card's lowest power limit.", "power_min_mw", _watts),
    _Gauge("gpu_power_max_limit_watts", "The card's highest power limit.", "power_max_mw", _watts),
    _Gauge("gpu_sm_clock_hertz", "Clock of the multiprocessors.", "sm_clock_mhz", _hertz),
    _Gauge("gpu_memory_clock_hertz", "Clock of the memory.", "memory_clock_mhz", _hertz),
    _Gauge("gpu_mig_enabled", "1 in MIG mode.", "is_mig"),
    _Gauge(
        "gpu_remap_pending",
        "1 if the next reset will replace memory rows.",
        "remapped_rows",
        lambda rows: float(rows.is_pending),
    ),
    _Gauge(
        "gpu_remap_failed",
        "1 if memory rows could not be replaced.",
        "remapped_rows",
        lambda rows: float(rows.has_failed),
    ),
    _Gauge("gpu_last_xid", "Code of the last XID error since the agent started.", "last_xid"),
)


_ACTION_OF_DRIVER = {
    "none": "none",
    "reset": "reset_gpu",
    "drain_and_reset": "reset_gpu",
    "bus_reset": "reset_gpu",
    "reboot": "restart_node",
    "system_reboot": "restart_node",
}  # catalogue action by NVML's recovery action, by default ``ask``


def labels(info: GpuInfo) -> list[str]:
    return [str(info.index), info.name, info.uuid]


def families(readings: Sequence[Reading]) -> Iterator[Metric]:
    for gauge in _GAUGES:
        family = GaugeMetricFamily(gauge.name, gauge.help, labels=LABELS)
        for info, reading in readings:
            value = getattr(reading, gauge.field)
            if value is not None:
                family.add_metric(labels(info), gauge.convert(value))
        yield family
    yield _throttling(readings)
    yield _ecc(readings)
    yield _remapped(readings)
    yield _recovery(readings)


def _throttling(readings: Sequence[Reading]) -> Metric:
    """Return a series for each reason, so that its end shows."""
    family = GaugeMetricFamily(
        "gpu_throttle_reason", "1 while clocks are reduced for this reason.", labels=[*LABELS, "reason"]
    )
    for info, reading in readings:
        if reading.throttle_reasons is not None:
            for reason in THROTTLE_REASONS.values():
                family.add_metric([*labels(info), reason], int(reason in reading.throttle_reasons))
    return family


def _ecc(readings: Sequence[Reading]) -> Metric:
    family = CounterMetricFamily("gpu_ecc_errors", "ECC errors since the driver was loaded.", labels=[*LABELS, "type"])
    for info, reading in readings:
        if reading.ecc is not None:
            family.add_metric([*labels(info), "corrected"], reading.ecc.volatile_corrected)
            family.add_metric([*labels(info), "uncorrected"], reading.ecc.volatile_uncorrected)
    return family


def _remapped(readings: Sequence[Reading]) -> Metric:
    family = GaugeMetricFamily("gpu_remapped_rows", "Replaced memory rows.", labels=[*LABELS, "type"])
    for info, reading in readings:
        if reading.remapped_rows is not None:
            family.add_metric([*labels(info), "corrected"], reading.remapped_rows.corrected)
            family.add_metric([*labels(info), "uncorrected"], reading.remapped_rows.uncorrected)
    return family


def _recovery(readings: Sequence[Reading]) -> Metric:
    family = GaugeMetricFamily(
        "gpu_recovery_action",
        "1 for the recovery action that the driver requests.",
        labels=[*LABELS, "action"],
    )
    for info, reading in readings:
        if reading.recovery_action is not None:
            family.add_metric([*labels(info), reading.recovery_action], 1)
    return family


def record_families(gpus: Iterable[KnownGpu]) -> Iterator[Metric]:
    present = GaugeMetricFamily("gpu_present", "0 for a GPU that the driver no longer lists.", labels=LABELS)
    xids = CounterMetricFamily(
        "gpu_xid_errors",
        "XID errors since the reboot or GPU reset, by code and recommended action.",
        labels=[*LABELS, "xid", "action"],
    )
    for gpu in gpus:
        present.add_metric(labels(gpu.info), int(gpu.is_present))
        for code, count in sorted(gpu.xids.items()):
            xids.add_metric([*labels(gpu.info), str(code), _action(code, gpu.recovery_action)], count)
    yield from (present, xids)


def _action(code: int, recovery_action: str | None) -> str:
    action = xid(code).action
    return action if action != "driver_says" else _ACTION_OF_DRIVER.get(recovery_action or "", "ask")
