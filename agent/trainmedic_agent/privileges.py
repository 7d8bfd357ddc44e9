"""What this process may do on its node, as far as the kernel says so before anything is tried.

Who calls it: ``trainmedic_agent.wiring.agent_check``, for a person who installs an agent, ``exclusive_gpus`` and
``disk.exclusive_roots``.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from trainmedic_core.machine_locks import Holder

# capabilities(7), by number in the mask that /proc shows.
_CAPABILITIES = {
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_FOWNER": 3,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_LEASE": 28,
}
POWER = ("CAP_SYS_ADMIN",)
"""What NVIDIA's driver requires to set a power limit."""
FILES_OF_OTHERS = ("CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_LEASE")
"""To delete what other users own: writing in their directories, in sticky ones too, and knowing that a file is
not in use."""
PROCESSES_OF_OTHERS = ("CAP_SYS_PTRACE",)
"""To see what other users' processes have open, where the kernel does not answer for a file by itself."""


class Privileges(Struct, frozen=True):
    """``user`` is the process's user; ``capabilities`` are those of Linux's that it has and that matter here."""

    user: str
    capabilities: frozenset[str]

    def lacks(self, needed: Sequence[str]) -> list[str]:
        """Return those of `needed` that the process does not have."""
        return [name for name in needed if name not in self.capabilities]


def current_privileges(proc: Path = Path("/proc")) -> Privileges:
    """Read what this process has from the kernel."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return Privileges(user, capabilities_of("self", proc))


def capabilities_of(pid: int | str, proc: Path = Path("/proc")) -> frozenset[str]:
    """Return the capabilities of a process that matter here; none where the kernel does not say."""
    mask = 0
    try:
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("CapEff:"):
                mask = int(line.split()[1], 16)
    except OSError:
        pass
    return frozenset(name for name, number in _CAPABILITIES.items() if mask >> number & 1)


def is_agent(holder: Holder, needed: Sequence[str]) -> bool:
    """Return whether who holds a name could be an agent, with the privileges `needed` for what the name stands for.

    Any other process may hold the name merely to be in the way.
    """
    if holder.user in {0, os.geteuid()}:
        return True
    return holder.pid is not None and not set(needed) - capabilities_of(holder.pid)
