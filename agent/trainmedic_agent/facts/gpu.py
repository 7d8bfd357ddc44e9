"""GPU readings as plain values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from trainmedic_agent.errors import GpuError
from trainmedic_agent.ports.gpus import GpuInfo, GpuReading, Gpus, in_watts


def facts(info: GpuInfo, reading: GpuReading) -> dict[str, Any]:
    values: dict[str, Any] = {
        "index": info.index,
        "uuid": info.uuid,
        "name": info.name,
        "pci_address": info.pci_address,
        "utilization_percent": reading.utilization_percent,
        "memory": _memory(reading),
        "temperature_celsius": reading.temperature_celsius,
        "memory_temperature_celsius": reading.memory_temperature_celsius,
        "slowdown_celsius": reading.slowdown_celsius,
        "power": _power(reading),
        "clocks": _without_empty({"sm_mhz": reading.sm_clock_mhz, "memory_mhz": reading.memory_clock_mhz}),
        "throttle_reasons": None if reading.throttle_reasons is None else list(reading.throttle_reasons),
        "ecc": None if reading.ecc is None else asdict(reading.ecc),
        "remapped_rows": None if reading.remapped_rows is None else asdict(reading.remapped_rows),
        "mig": reading.is_mig,
        "recovery_action": reading.recovery_action,
        "xid": reading.last_xid,
        "unread": dict(reading.unread) or None,
    }
    return _without_empty(values)


def all_facts(gpus: Gpus) -> dict[str, Any]:
    """Return ``gpus`` by index, ``gpu_problems`` and ``driver``, if any."""
    inventory = gpus.inventory()
    problems = list(inventory.problems)
    cards = []
    for info in inventory.gpus:
        try:
            cards.append(facts(info, gpus.read(info.uuid)))
        except GpuError as error:
            problems.append(str(error))
    return _without_empty({"gpus": cards or None, "gpu_problems": problems or None, "driver": inventory.driver})


def presence(gpus: Gpus, pods_of: Callable[[Iterable[int]], Sequence[str]] = lambda pids: ()) -> dict[str, Any]:
    """Return the GPUs' part of the agent's presence. Never raises.

    Readings are separate: the server rebuilds its topology if ``gpus`` changes.
    """
    inventory = gpus.inventory()
    cards, readings = [], []
    for info in inventory.gpus:
        card: dict[str, Any] = {
            "index": info.index,
            "uuid": info.uuid,
            "name": info.name,
            "pci_bus_id": info.pci_address,
        }
        try:
            limits = gpus.power(info.uuid)
        except GpuError as error:
            card["problem"] = str(error)
        else:
            card |= _without_empty(
                {
                    "power_limit_watts": in_watts(limits.enforced_mw),
                    "default_limit_watts": in_watts(limits.default_mw),
                    "min_limit_watts": in_watts(limits.min_mw),
                    "max_limit_watts": in_watts(limits.max_mw),
                }
            )
            with contextlib.suppress(GpuError):  # some drivers do not list processes; the GPU is fine
                card |= _without_empty({"pods": list(pods_of(gpus.processes(info.uuid))) or None})
            with contextlib.suppress(GpuError):
                readings.append(_shown_reading(info, gpus.read(info.uuid)))
        cards.append(card)
    others = {
        "driver": inventory.driver,
        "gpu_problems": list(inventory.problems) or None,
        "gpu_readings": readings or None,
    }
    return {"gpus": cards, **_without_empty(others)}


def _shown_reading(info: GpuInfo, reading: GpuReading) -> dict[str, Any]:
    return _without_empty(
        {
            "uuid": info.uuid,
            "temperature_celsius": reading.temperature_celsius,
            "power_watts": in_watts(reading.power_draw_mw),
            "utilization_percent": reading.utilization_percent,
        }
    )


def _memory(reading: GpuReading) -> dict[str, Any] | None:
    total, used = reading.memory_total_bytes, reading.memory_used_bytes
    if total is None or used is None:
        return None
    return {"total_bytes": total, "used_bytes": used, "percent": round(100 * used / total, 1) if total else 0.0}


def _power(reading: GpuReading) -> dict[str, Any]:
    return _without_empty(
        {
            "draw_watts": in_watts(reading.power_draw_mw),
            "limit_watts": in_watts(reading.power_limit_mw),
            "enforced_watts": in_watts(reading.power_enforced_mw),
            "default_watts": in_watts(reading.power_default_mw),
            "min_watts": in_watts(reading.power_min_mw),
            "max_watts": in_watts(reading.power_max_mw),
        }
    )


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != {}}
