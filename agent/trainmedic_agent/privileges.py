from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from trainmedic_core.machine_locks import Holder

# Bit numbers, from capabilities(7).
_CAPABILITIES = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_FOWNER": 3,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_LEASE": 28,
}
POWER = ("CAP_SYS_ADMIN",)  # needed by NVIDIA's driver to set a power limit
FILES_OF_OTHERS = ("CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_LEASE")  # write to even sticky directories, and take leases
PROCESSES_OF_OTHERS = ("CAP_SYS_PTRACE",)  # capability to see others' open files without leases


class Privileges(Struct, frozen=True):
    user: str
    capabilities: frozenset[str]

    def lacks(self, needed: Sequence[str]) -> list[str]:
        return [name for name in needed if name not in self.capabilities]


def current_privileges(proc: Path = Path("/proc")) -> Privileges:
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return Privileges(user, capabilities_of("self", proc))


def capabilities_of(pid: int | str, proc: Path = Path("/proc")) -> frozenset[str]:
    mask = effective_mask(pid, proc) or 0
    return frozenset(name for name, number in _CAPABILITIES.items() if mask >> number & 1)


def effective_mask(pid: int | str, proc: Path = Path("/proc")) -> int | None:
    """Return the effective capabilities as bits; None if unknown."""
    with contextlib.suppress(OSError):
        # A process's name may have any character except a line feed, which is escaped.
        for line in (proc / str(pid) / "status").read_bytes().split(b"\n"):
            if line.startswith(b"CapEff:"):
                return int(line.split()[1], 16)
    return None


def is_agent(holder: Holder, needed: Sequence[str]) -> bool:
    """Return whether the holder could be an agent, not a process that only blocks it."""
    if holder.user in {0, os.geteuid()}:
        return True
    return holder.pid is not None and not set(needed) - capabilities_of(holder.pid)
