"""The GPUs of this node, as the agent sees them: which there are, what they report, and their power limits.

Power is in milliwatts, as drivers count it, so that a limit that was read is exactly the one that is set again.
Implemented by ``trainmedic_agent/adapters/nvml_gpus``, and around it by
``trainmedic_agent/adapters/time_limited_gpus``. Every method may be called from any thread, does not wait for calls in
other threads, and raises only `trainmedic_agent.errors.GpuError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, overload

from msgspec import Struct, field


class GpuInfo(Struct, frozen=True):
    """What identifies a GPU.

    ``index``: its number on the node, from 0; it may change when the driver is loaded anew.
    ``uuid``: the driver's, ``GPU-…``; it never changes.
    ``name``: the model, such as ``NVIDIA H100 80GB HBM3``.
    ``pci_address``: as ``0000:18:00.0``.
    """

    index: int
    uuid: str
    name: str
    pci_address: str


class Inventory(Struct, frozen=True):
    """Which GPUs there are.

    ``gpus``: those that answer, by index.
    ``problems``: a sentence for each that does not answer or that another agent has, or for the driver.
    ``driver``: the driver's version; None where there is no driver.
    """

    gpus: tuple[GpuInfo, ...] = ()
    problems: tuple[str, ...] = ()
    driver: str | None = None


class PowerLimits(Struct, frozen=True):
    """A GPU's power limits in milliwatts. None is what the card does not report.

    ``limit_mw``: the limit that was set.
    ``enforced_mw``: the limit in force, the lowest of several limiters.
    ``session``: a name that changes when the driver may have forgotten what was set: it was loaded anew, the GPU was
    away, or this process has started since.
    ``default_mw``, ``min_mw``, ``max_mw``: the card's default limit, and the lowest and highest that it takes.
    ``draw_mw``: what it draws now.
    """

    limit_mw: int
    enforced_mw: int
    session: str
    default_mw: int | None = None
    min_mw: int | None = None
    max_mw: int | None = None
    draw_mw: int | None = None


class EccErrors(Struct, frozen=True):
    """Counts since the driver was loaded (volatile) and since the card was made (aggregate)."""

    volatile_corrected: int
    volatile_uncorrected: int
    aggregate_corrected: int
    aggregate_uncorrected: int


class RemappedRows(Struct, frozen=True):
    """Rows of memory that were replaced by spare ones.

    ``corrected``, ``uncorrected``: how many, by the kind of error that made them unusable.
    ``is_pending``: the next reset will replace some.
    ``has_failed``: there was no spare row left, so the card has to be replaced.
    """

    corrected: int
    uncorrected: int
    is_pending: bool
    has_failed: bool


class GpuReading(Struct, frozen=True):
    """What a GPU reports at one moment; None is what it does not offer. The names of fields end with their unit.

    ``utilization_percent``: the time in which a kernel ran; that of the memory, in which it was read or written.
    ``slowdown_celsius``: the temperature at which the chip slows itself down.
    ``power_enforced_mw``: the limit in force; ``power_limit_mw`` is the one that was set.
    ``throttle_reasons``: why clocks are held down now, of `THROTTLE_REASONS`.
    ``is_mig``: whether the card is divided by MIG.
    ``energy_mj``: what it has drawn since the driver was loaded or the card was reset.
    ``recovery_action``: what the driver asks for, so that the card works again; of `RECOVERY_ACTIONS`.
    ``last_xid``: the last of the driver's XID errors since this process began to listen (`Gpus.xids`).
    ``unread``: what it offers and failed to report: the reason by the name of the reading.
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
    energy_mj: int | None = None
    recovery_action: str | None = None
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
"""Why clocks are held down, by NVML's bit (nvml.h, nvmlClocksEventReason…)."""


RECOVERY_ACTIONS: Mapping[int, str] = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
"""What a driver asks for, by NVML's number (nvml.h, nvmlDeviceGpuRecoveryAction_t). Beside them there is "unknown", for
the number of a later release."""


@overload
def in_watts(milliwatts: int) -> float: ...
@overload
def in_watts(milliwatts: int | None) -> float | None: ...
def in_watts(milliwatts: int | None) -> float | None:
    """Convert to watts for people: 560, or 560.5."""
    if milliwatts is None:
        return None
    return milliwatts // 1000 if milliwatts % 1000 == 0 else milliwatts / 1000


class Gpus(Protocol):
    """The GPUs of this node."""

    def inventory(self) -> Inventory:
        """Return which GPUs there are now. Never raises: what is wrong is in ``problems``."""
        ...

    def find(self, name: str) -> GpuInfo:
        """Return the GPU of this UUID (any case, with ``GPU-`` or without), PCI address (any case, a domain of four or
        eight digits) or index.

        Raises GpuAbsent, which names those that are there; NotSupported for a MIG instance.
        """
        ...

    def power(self, uuid: str) -> PowerLimits: ...

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        """Set the limit once. After GpuLost, DriverAbsent and GpuFailure it is unknown whether that had an effect."""
        ...

    def processes(self, uuid: str) -> tuple[int, ...]:
        """Return the ids of the processes that compute on it, in the node's process namespace."""
        ...

    def read(self, uuid: str) -> GpuReading:
        """Return everything that it reports. Raises GpuLost, GpuAbsent or DriverAbsent where it reports nothing."""
        ...

    def xids(self) -> Mapping[str, Mapping[int, int]]:
        """Return how often the driver has reported which XID error since this process began to listen, by UUID and
        code; also of GPUs that are lost. Never raises."""
        ...

    def close(self) -> None:
        """Let the driver go. A call afterwards opens it again."""
        ...
