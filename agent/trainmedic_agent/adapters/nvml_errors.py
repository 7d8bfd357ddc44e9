"""NVML error codes as `trainmedic_agent.errors.GpuError`."""

from __future__ import annotations

from typing import Any

import pynvml

from trainmedic_agent.errors import DriverAbsent, GpuError, GpuFailure, GpuLost, NoPermission, NotSupported

# Not supported by card or driver.
UNAVAILABLE = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_DEPRECATED)
STALE = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
)  # reopen NVML: the driver is not loaded or was reloaded
CARD_GONE = (  # the card no longer responds
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_GPU_NOT_FOUND,
)
_NO_LIBRARY = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def driver_error(error: Any) -> GpuError:
    if error.value in _NO_LIBRARY:
        return DriverAbsent("NVML (libnvidia-ml.so.1) is not on this machine: NVIDIA's driver is not installed")
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return DriverAbsent(
            "NVML and the loaded driver are of different versions: load the new driver, or restart the node"
        )
    if error.value in STALE:
        return DriverAbsent(f"NVIDIA's driver is not loaded, or was reloaded: {error}")
    if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
        return NoPermission(f"the agent may not use NVIDIA's driver: {error}. It needs access to /dev/nvidiactl")
    return GpuFailure(f"NVIDIA's driver does not respond: {error} (NVML error {error.value})")


def call_error(error: Any, called: str) -> GpuError:
    """Translate an error of a call on a card or ``the driver``."""
    if error.value in STALE:
        return driver_error(error)
    if error.value in CARD_GONE:
        return GpuLost(f"{called} no longer responds: {error}. Check the driver's log (dmesg, Xid)")
    if error.value in UNAVAILABLE:
        return NotSupported(f"{called} does not support this: {error}")
    if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
        return NoPermission(
            f"the driver denies the agent this call on {called}: {error}. It needs root or CAP_SYS_ADMIN"
        )
    return GpuFailure(f"{called}: {error} (NVML error {error.value})")
