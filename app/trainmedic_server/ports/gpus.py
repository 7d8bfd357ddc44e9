"""The GPUs of this node, as the agent sees them: who they are, what they report, and their power limits.

Power is in milliwatts, as drivers count it, so that a limit that was read is exactly the one that is set
again. Implemented by ``adapters/nvml_gpus``. Every method may be called from any thread, does not wait for
calls in other threads, and raises the errors of `trainmedic_server.errors.GpuError` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, overload


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """Who a GPU is. ``uuid`` is the driver's, ``GPU-…``; ``index`` may be another after the driver was loaded anew."""

    index: int
    uuid: str
    name: str
    pci_address: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs that answer, by index, and one sentence for each that does not, or for the driver."""

    gpus: tuple[GpuInfo, ...] = ()
    problems: tuple[str, ...] = ()
    driver: str | None = None


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """``limit_mw`` was set, ``enforced_mw`` is what holds; the lower of several limiters. None: not told.

    ``session`` is another one when the driver may have forgotten what was set: it was loaded anew, the GPU was
    away, or this process has started since.
    """

    limit_mw: int
    enforced_mw: int
    session: str
    default_mw: int | None = None
    min_mw: int | None = None
    max_mw: int | None = None
    draw_mw: int | None = None


@dataclass(frozen=True, slots=True)
class EccErrors:
    """Counts since the driver was loaded (volatile) and since the card was made (aggregate)."""

    volatile_corrected: int
    volatile_uncorrected: int
    aggregate_corrected: int
    aggregate_uncorrected: int


@dataclass(frozen=True, slots=True)
class RemappedRows:
    """Rows of memory that were replaced by spare ones. ``is_pending``: some will be at the next reset;
    ``has_failed``: there was none to spare, and the card wants to be replaced."""

    corrected: int
    uncorrected: int
    is_pending: bool
    has_failed: bool


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What a GPU reports at one moment. None is what it does not offer; ``unread`` says what it offers and
    failed to tell, by the name of the field, and why.

    ``xids`` counts the driver's XID errors by code since this process began to listen, ``last_xid`` is the last.
    """

    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    slowdown_celsius: float | None = None
    power_draw_mw: int | None = None
    power_limit_mw: int | None = None
    power_enforced_mw: int | None = None
    power_default_mw: int | None = None
    power_min_mw: int | None = None
    power_max_mw: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    ecc: EccErrors | None = None
    remapped_rows: RemappedRows | None = None
    is_mig: bool | None = None
    xids: Mapping[int, int] = field(default_factory=dict)
    last_xid: int | None = None
    unread: Mapping[str, str] = field(default_factory=dict)


THROTTLE_REASONS: Mapping[int, str] = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}
"""Why clocks are below their most, by NVML's bit (nvml.h, nvmlClocksEventReason…)."""


@overload
def in_watts(milliwatts: int) -> float: ...
@overload
def in_watts(milliwatts: int | None) -> float | None: ...
def in_watts(milliwatts: int | None) -> float | None:
    """560, or 560.5, as people are told."""
    if milliwatts is None:
        return None
    return milliwatts // 1000 if milliwatts % 1000 == 0 else milliwatts / 1000


class Gpus(Protocol):
    """The GPUs of this node."""

    def inventory(self) -> Inventory:
        """Who is there now. Never raises: what is wrong is in ``problems``."""
        ...

    def find(self, name: str) -> GpuInfo:
        """The GPU of this UUID (any case, with ``GPU-`` or without), PCI address (any case, a domain of four or
        eight digits) or index. Raises GpuAbsent naming those that are there; NotSupported for a MIG instance."""
        ...

    def power(self, uuid: str) -> PowerLimits: ...

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        """Set it once. Whether it had an effect is not known after GpuLost, DriverAbsent and GpuFailure."""
        ...

    def processes(self, uuid: str) -> tuple[int, ...]:
        """The ids of the processes that compute on it, as the node counts them: of use only to who shares the
        node's process namespace."""
        ...

    def read(self, uuid: str) -> GpuReading:
        """Everything that it reports. Raises GpuLost, GpuAbsent or DriverAbsent where it reports nothing at all."""
        ...

    def close(self) -> None:
        """Let the driver go. Whoever calls afterwards opens it again."""
        ...
