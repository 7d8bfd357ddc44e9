"""Port to the node's GPUs.

Power is in milliwatts, the driver's unit, so that a limit can be restored exactly. Methods are thread-safe, do not wait
for other threads' calls, and raise only `trainmedic_agent.errors.GpuError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, overload

from msgspec import Struct, field

T = TypeVar("T")


class GpuInfo(Struct, frozen=True):
    index: int  # from 0; may change when the driver is reloaded
    uuid: str  # the driver's ``GPU-…``, constant
    name: str  # model
    pci_address: str  # ``0000:18:00.0``


class Inventory(Struct, frozen=True):
    gpus: tuple[GpuInfo, ...] = ()  # those that respond, by index
    problems: tuple[str, ...] = ()  # a sentence for the driver, or for each GPU that is silent or another agent's
    driver: str | None = None  # its version


class PowerLimits(Struct, frozen=True):
    """A GPU's power limits in milliwatts, None if not reported."""

    limit_mw: int  # configured
    enforced_mw: int  # effective, the lowest of several limiters
    session: str  # changes when the driver may have forgotten settings
    default_mw: int | None = None
    min_mw: int | None = None
    max_mw: int | None = None
    draw_mw: int | None = None
    forgotten_mw: int | None = None  # the limit before NVML was closed, if the driver forgot it and none was set since


class EccErrors(Struct, frozen=True):
    """Counts since the driver was loaded (volatile) and over the card's lifetime (aggregate)."""

    volatile_corrected: int
    volatile_uncorrected: int
    aggregate_corrected: int
    aggregate_uncorrected: int


class RemappedRows(Struct, frozen=True):
    """Memory rows replaced by spare ones."""

    corrected: int  # because of corrected errors
    uncorrected: int
    is_pending: bool  # the next reset will replace rows
    has_failed: bool  # the card must be replaced


class GpuReading(Struct, frozen=True):
    """Readings of a GPU at one moment, None if unsupported."""

    utilization_percent: float | None = None  # share of the time in which a kernel ran
    memory_utilization_percent: float | None = None  # share of the time in which memory was accessed
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    slowdown_celsius: float | None = None  # temperature at which the chip throttles
    power_draw_mw: int | None = None
    power_limit_mw: int | None = None  # configured
    power_enforced_mw: int | None = None  # effective
    power_default_mw: int | None = None
    power_min_mw: int | None = None
    power_max_mw: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    ecc: EccErrors | None = None
    remapped_rows: RemappedRows | None = None
    is_mig: bool | None = None
    energy_mj: int | None = None  # since the driver was loaded or the card was reset
    recovery_action: str | None = None  # one of `RECOVERY_ACTIONS`, or ``unknown``
    last_xid: int | None = None  # since this process began to listen
    unread: Mapping[str, str] = field(default_factory=dict)  # errors of failed readings, by the reading's name


class GpuLinks(Struct, frozen=True):
    """A GPU's connections, None if unsupported."""

    pcie_width: int | None = None  # lanes
    pcie_max_width: int | None = None  # possible for GPU and slot together, as the next maximum
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    pcie_replays: int | None = None  # since the driver was loaded, as the NVLink errors
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    nvlink_errors: int | None = None
    performance_state: int | None = None  # 0 is the fastest. In a slower one an idle link may be slow
    unread: Mapping[str, str] = field(default_factory=dict)  # as in `GpuReading`


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
}  # by NVML's bit (nvml.h, nvmlClocksEventReason…)


RECOVERY_ACTIONS: Mapping[int, str] = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}  # by NVML's number (nvml.h, nvmlDeviceGpuRecoveryAction_t)


@overload
def in_watts(milliwatts: int) -> float: ...
@overload
def in_watts(milliwatts: int | None) -> float | None: ...
def in_watts(milliwatts: int | None) -> float | None:
    """For display: 560, or 560.5."""
    if milliwatts is None:
        return None
    return milliwatts // 1000 if milliwatts % 1000 == 0 else milliwatts / 1000


# A new method also needs `NvmlGpus`, `TimeLimitedGpus`, tests/driver/nvml.c and
# tests/contract/test_gpus.py.
class Gpus(Protocol):
    @property
    def openings(self) -> int: ...  # of the driver, which may forget limits before each

    def inventory(self) -> Inventory:
        """Never raises: errors are in ``problems``."""
        ...

    def find(self, name: str) -> GpuInfo:
        """Return the GPU by UUID (any case, with or without ``GPU-``), PCI address (domain of four or eight digits) or
        index.

        Raises GpuAbsent, GpuLost if it was here before, NotSupported for a MIG instance.
        """
        ...

    def power(self, uuid: str) -> PowerLimits: ...

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        """Set the limit once. After GpuLost, DriverAbsent or GpuFailure it may have taken effect."""
        ...

    def processes(self, uuid: str) -> tuple[int, ...]:
        """Return its compute processes' IDs in the node's namespace."""
        ...

    def read(self, uuid: str) -> GpuReading:
        """Raises GpuLost, GpuAbsent, DriverAbsent or GpuStuck without any reading."""
        ...

    def links(self, uuid: str) -> GpuLinks:
        """Raises as `read`."""
        ...

    def while_closed(self, uuids: Sequence[str], act: Callable[[], T]) -> T:
        """Call `act`, which resets these GPUs, with the driver closed. Other calls raise DriverAbsent.

        Raises GpuFailure, without `act`, if a call does not return or during another reset.
        """
        ...

    def xids(self) -> Mapping[str, Mapping[int, int]]:
        """Return numbers of XID errors by UUID and code since this process started, also of lost GPUs. Never raises."""
        ...

    def close(self) -> None: ...
