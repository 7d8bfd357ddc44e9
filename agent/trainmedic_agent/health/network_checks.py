"""Network interfaces and InfiniBand ports, from ``/sys/class``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainmedic_agent.health.checks import CheckResults, HealthCheck, HealthValue, HealthVerdict, ValueKind, checked
from trainmedic_agent.health.sysfs import entries, number, pcie_checks, text, unknown_if_unread

MIN_RATE = "min_gbps"  # check of what a command requires
_NO_SPEED = 1  # Mb/s, of an interface that is up without a speed, such as a virtual one
_IS_UP = 1  # IFF_UP: an administrator has switched it on
_INFINIBAND = 32  # ARPHRD_INFINIBAND: its port is checked instead
_ACTIVE, _DOWN = 4, 1  # states of an InfiniBand port
_DISABLED = 3  # its physical state
_PORT_ERRORS = ("symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors")
_FRAME_ERRORS = ("rx_crc_errors", "rx_frame_errors")


def network_checks(sys: Path) -> CheckResults:
    """Check each link. One that is down is compared with its record only: it may never have been used."""
    results = CheckResults()
    with unknown_if_unread(results, "link", ""):
        for interface in entries(sys / "class" / "net"):
            with unknown_if_unread(results, "link", interface.name):
                # Virtual interfaces have no device.
                if (interface / "device").exists() and number(interface / "type") != _INFINIBAND:
                    _add_interface(interface, results)
        for device in entries(sys / "class" / "infiniband"):
            with unknown_if_unread(results, "link", device.name):
                results.checks += pcie_checks(device / "device", device.name)
                for port in entries(device / "ports"):
                    _add_port(port, f"{device.name}/{port.name}", results)
    return results


def rate_checks(values: Iterable[HealthValue], least: float) -> list[HealthCheck]:
    """Compare each RDMA port that is up with `least` Gbit/s; without RDMA ports, the fastest interface."""
    values = list(values)
    rates = [(value.amount, value.part) for value in values if value.name == "port_rate"]
    if not rates:
        speeds = [(value.amount, value.part) for value in values if value.name == "link_rate"]
        rates = [(speed / 1000, part) for speed, part in sorted(speeds)[-1:] if speed > _NO_SPEED]
    up, limit = [(rate, part) for rate, part in rates if rate > 0], f"{least:g} Gb/s"
    if not up:
        return [checked(MIN_RATE, "", False, "no link that is up with a known rate", limit)]
    return [checked(MIN_RATE, part, rate >= least, f"{rate:g} Gb/s", limit) for rate, part in up]


def _add_interface(interface: Path, results: CheckResults) -> None:
    name = interface.name
    if not (number(interface / "flags", 16) or 0) & _IS_UP:
        return
    if not (interface / "device" / "infiniband").exists():  # else checked with its port
        results.checks += pcie_checks(interface / "device", name)
    is_up = text(interface / "operstate") == "up"
    speed = number(interface / "speed") or 0
    if is_up:
        observed = f"up, {speed} Mb/s" if speed > 0 else "up"
        results.checks.append(HealthCheck("link", name, HealthVerdict.OK, observed, "up"))
    rate = max(speed, _NO_SPEED) if is_up else 0
    results.values.append(HealthValue("link_rate", name, ValueKind.STATE, rate, "Mb/s"))
    _add_counter(results, "link_downs", name, [interface / "carrier_down_count"])
    _add_counter(results, "link_errors", name, [interface / "statistics" / error for error in _FRAME_ERRORS])


def _add_port(port: Path, name: str, results: CheckResults) -> None:
    state, physical, rate = (text(port / file) or "" for file in ("state", "phys_state", "rate"))
    state_number = int(state.partition(":")[0])
    if physical.startswith(f"{_DISABLED}:"):
        return
    is_up = state_number == _ACTIVE
    if state_number != _DOWN:
        verdict = HealthVerdict.OK if is_up else HealthVerdict.DEGRADED
        results.checks.append(HealthCheck("link", name, verdict, f"{state}, {rate}", "4: ACTIVE"))
    amount = float(rate.split()[0]) if is_up and rate else 0.0
    results.values.append(HealthValue("port_rate", name, ValueKind.STATE, amount, "Gb/s"))
    counters = port / "counters"
    _add_counter(results, "link_downs", name, [counters / "link_downed"])
    _add_counter(results, "link_errors", name, [counters / error for error in _PORT_ERRORS])


def _add_counter(results: CheckResults, name: str, part: str, files: list[Path]) -> None:
    counts = [count for file in files if (count := number(file)) is not None]
    if counts:
        results.values.append(HealthValue(name, part, ValueKind.COUNTER, sum(counts)))
