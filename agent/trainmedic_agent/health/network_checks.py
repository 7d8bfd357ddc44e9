"""Network interfaces and InfiniBand ports, from ``/sys/class``."""

from __future__ import annotations

from pathlib import Path

from trainmedic_agent.health.checks import Check, Found, Kind, Value, Verdict
from trainmedic_agent.health.sysfs import Unread, entries, number, pcie_checks, text

_IS_UP = 1  # IFF_UP: an administrator has switched it on
_INFINIBAND = 32  # ARPHRD_INFINIBAND: its port is checked instead
_ACTIVE, _DOWN, _DISABLED = 4, 1, 3
_PORT_ERRORS = ("symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors")
_FRAME_ERRORS = ("rx_crc_errors", "rx_frame_errors")


def network_checks(sys: Path) -> Found:
    """Check each link in use. A link that is down is compared with its record only: it may never have been used."""
    found = Found()
    with Unread(found, "link", ""):
        for interface in entries(sys / "class" / "net"):
            with Unread(found, "link", interface.name):
                if (interface / "device").exists() and number(interface / "type") != _INFINIBAND:
                    _interface(interface, found)
        for device in entries(sys / "class" / "infiniband"):
            with Unread(found, "link", device.name):
                found.checks += pcie_checks(device / "device", device.name)
                for port in entries(device / "ports"):
                    _port(port, f"{device.name}/{port.name}", found)
    return found


def _interface(interface: Path, found: Found) -> None:
    name = interface.name
    if not (number(interface / "flags", 16) or 0) & _IS_UP:
        return
    if not (interface / "device" / "infiniband").exists():  # else checked with its port
        found.checks += pcie_checks(interface / "device", name)
    is_up = text(interface / "operstate") == "up"
    speed = number(interface / "speed") or 0
    if is_up:
        observed = f"up, {speed} Mb/s" if speed > 0 else "up"
        found.checks.append(Check("link", name, Verdict.OK, observed, "up"))
    # A device without a speed, such as a virtual one, is 1 while it is up.
    rate = max(speed, 1) if is_up else 0
    found.values.append(Value("link_rate", name, Kind.STATE, rate, "Mb/s"))
    _count(found, "link_downs", name, [interface / "carrier_down_count"])
    _count(found, "link_errors", name, [interface / "statistics" / error for error in _FRAME_ERRORS])


def _port(port: Path, name: str, found: Found) -> None:
    state, physical, rate = (text(port / file) or "" for file in ("state", "phys_state", "rate"))
    number_of_state = int(state.partition(":")[0])
    if physical.startswith(f"{_DISABLED}:"):
        return
    is_up = number_of_state == _ACTIVE
    if number_of_state != _DOWN:
        verdict = Verdict.OK if is_up else Verdict.DEGRADED
        found.checks.append(Check("link", name, verdict, f"{state}, {rate}", "4: ACTIVE"))
    amount = float(rate.split()[0]) if is_up and rate else 0.0
    found.values.append(Value("link_rate", name, Kind.STATE, amount, "Gb/s"))
    counters = port / "counters"
    _count(found, "link_downs", name, [counters / "link_downed"])
    _count(found, "link_errors", name, [counters / error for error in _PORT_ERRORS])


def _count(found: Found, name: str, part: str, files: list[Path]) -> None:
    counts = [count for file in files if (count := number(file)) is not None]
    if counts:
        found.values.append(Value(name, part, Kind.COUNTER, sum(counts)))
