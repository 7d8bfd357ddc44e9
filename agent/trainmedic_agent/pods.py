"""Lookup of processes' pods by control group. A container needs ``hostPID``.

The kubelet puts the pod's UID into the group's name:

- ``/kubepods/burstable/pod1a2b…-…/cri-containerd…`` with cgroupfs
- ``/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1a2b…_….slice/crio-….scope`` with systemd
- ``/../../kubepods-pod1a2b…_….slice/…`` seen from another container, with version 2
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
MOST_PROCESSES = 256  # per GPU; others are ignored
MOST_PODS = 32  # per GPU, which is divided into seven MIG instances at most
_LONGEST = 16 * 1024  # bytes read of a process's control groups
_LOGIN = b"/user.slice/"
# A static pod's UID is a hash without dashes here.
_POD = re.compile(rb"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:\n]|$)")


def pods_of(pids: Iterable[int], proc: Path | None = None) -> tuple[str, ...]:
    """Return the UIDs of the processes' pods."""
    uids: set[str] = set()
    for pid, _ in zip(pids, range(MOST_PROCESSES), strict=False):
        uid = _pod_of(pid, proc or PROC)
        if uid is not None:
            uids.add(uid)
    return tuple(sorted(uids)[:MOST_PODS])


def pod_in(groups: bytes) -> str | None:
    """Return the pod's UID from a ``/proc/<pid>/cgroup`` text. Users choose the names of a login's groups."""
    match = _POD.search(b"\n".join(line for line in groups.split(b"\n") if _LOGIN not in line))
    return match[1].decode().replace("_", "-") if match is not None else None


def _pod_of(pid: int, proc: Path) -> str | None:
    try:
        with (proc / str(pid) / "cgroup").open("rb", buffering=0) as file:
            return pod_in(file.read(_LONGEST))
    except OSError:
        return None  # ended, or not visible here
