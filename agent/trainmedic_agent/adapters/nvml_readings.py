"""NVML queries about a GPU, one by one, so that failures stay separate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from trainmedic_agent.adapters.nvml_errors import UNAVAILABLE
from trainmedic_agent.ports import gpus

_MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_NO_SUCH_LINK = (*UNAVAILABLE, pynvml.NVML_ERROR_INVALID_ARGUMENT)
_UNSIGNED_INT = 1  # NVML_VALUE_TYPE_UNSIGNED_INT

# Counters whose sum is taken: NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, _RECOVERY and _CRC; on GPUs before Hopper, the totals
# of CRC flit errors, CRC data errors, replays and recoveries over all links.
_NVLINK_ERRORS = ((161, 162, 163), (38, 45, 52, 59))

# By name in ``unread``. Each returns fields of `GpuReading`, or of `GpuLinks`, for a handle.
Queries = Mapping[str, Callable[[Any], Mapping[str, Any]]]


def collect(queries: Queries, handle: Any, ends: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values, and errors by query name, without unsupported readings.

    Raises errors with a code in `ends`.
    """
    values: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for name, ask in queries.items():
        try:
            values.update(ask(handle))
        except pynvml.NVMLError as error:
            if error.value in ends:
                raise
            if error.value not in UNAVAILABLE:
                unread[name] = str(error)
    return values, unread


def _first_supported(*asks: Callable[[], Any]) -> Any:
    """Return the first supported result: NVML renames functions."""
    for ask in asks[:-1]:
        try:
            return ask()
        except pynvml.NVMLError as error:
            if error.value not in (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
                raise
    return asks[-1]()


def _utilization(handle: Any) -> dict[str, Any]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return {"utilization_percent": rates.gpu, "memory_utilization_percent": rates.memory}


def _memory(handle: Any) -> dict[str, Any]:
    """Exclude the driver's own memory, like nvidia-smi, if NVML can."""
    memory = _first_supported(
        lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2),
        lambda: pynvml.nvmlDeviceGetMemoryInfo(handle),
    )
    return {"memory_total_bytes": memory.total, "memory_used_bytes": memory.used}


def _temperature(handle: Any) -> dict[str, Any]:
    sensor = pynvml.NVML_TEMPERATURE_GPU
    celsius = _first_supported(
        lambda: pynvml.nvmlDeviceGetTemperatureV(handle, sensor),
        lambda: pynvml.nvmlDeviceGetTemperature(handle, sensor),
    )
    return {"temperature_celsius": celsius}


def _memory_temperature(handle: Any) -> dict[str, Any]:
    celsius = _field(handle, _MEMORY_TEMPERATURE)
    return {"memory_temperature_celsius": celsius} if celsius else {}  # 0: the card has no such sensor


def _recovery_action(handle: Any) -> dict[str, Any]:
    return {"recovery_action": gpus.RECOVERY_ACTIONS.get(_field(handle, _RECOVERY_ACTION), "unknown")}


def _field(handle: Any, number: int) -> int:
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [number])
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal if value.valueType == _UNSIGNED_INT else value.value.ullVal)


def _throttle_reasons(handle: Any) -> dict[str, Any]:
    bits = _first_supported(
        lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )
    return {"throttle_reasons": tuple(name for bit, name in gpus.THROTTLE_REASONS.items() if bits & bit)}


def _ecc(handle: Any) -> dict[str, Any]:
    counts = (
        pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter)
        for counter in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC)
        for kind in (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    )
    return {"ecc": gpus.EccErrors(*counts)}


def _remapped_rows(handle: Any) -> dict[str, Any]:
    corrected, uncorrected, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    return {"remapped_rows": gpus.RemappedRows(corrected, uncorrected, bool(pending), bool(failed))}


def _nvlinks(handle: Any) -> dict[str, Any]:
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED)
        except pynvml.NVMLError as error:
            if error.value not in _NO_SUCH_LINK:
                raise
    return {"nvlinks": len(states), "nvlinks_up": sum(states)} if states else {}


def _nvlink_errors(handle: Any) -> dict[str, Any]:
    for fields in _NVLINK_ERRORS:
        try:
            return {"nvlink_errors": sum(_field(handle, number) for number in fields)}
        except pynvml.NVMLError as error:
            if error.value not in _NO_SUCH_LINK:
                raise
    return {}


def _pcie_generation(handle: Any) -> dict[str, Any]:
    now, most = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle), pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    return {"pcie_generation": now, "pcie_max_generation": most}


READINGS: Queries = {
    "utilization": _utilization,
    "memory": _memory,
    "temperature": _temperature,
    "memory_temperature": _memory_temperature,
    "power_draw": lambda handle: {"power_draw_mw": pynvml.nvmlDeviceGetPowerUsage(handle)},
    "power_limit": lambda handle: {"power_limit_mw": pynvml.nvmlDeviceGetPowerManagementLimit(handle)},
    "power_enforced": lambda handle: {"power_enforced_mw": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)},
    "sm_clock": lambda handle: {"sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)},
    "memory_clock": lambda handle: {"memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)},
    "throttle_reasons": _throttle_reasons,
    "ecc": _ecc,
    "remapped_rows": _remapped_rows,
    "energy": lambda handle: {"energy_mj": pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)},
    "recovery_action": _recovery_action,
    "mig": lambda handle: {"is_mig": pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE},
}

FIXED: Queries = {  # constant, so read once per session
    "power_default": lambda handle: {"power_default_mw": pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)},
    "power_constraints": lambda handle: dict(
        zip(("power_min_mw", "power_max_mw"), pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle), strict=True)
    ),
    "slowdown": lambda handle: {
        "slowdown_celsius": pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    },
}

LINKS: Queries = {
    "pcie_width": lambda handle: {
        "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_max_width": pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
    },
    "pcie_generation": _pcie_generation,
    "pcie_replays": lambda handle: {"pcie_replays": pynvml.nvmlDeviceGetPcieReplayCounter(handle)},
    "nvlinks": _nvlinks,
    "nvlink_errors": _nvlink_errors,
    "performance_state": lambda handle: {"performance_state": pynvml.nvmlDeviceGetPerformanceState(handle)},
}
