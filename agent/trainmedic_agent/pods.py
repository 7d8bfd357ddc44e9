"""Finds the pods that processes belong to, by their control groups. It only reads what the kernel shows to every user.

An agent in a container sees the node's processes where it shares their namespace (``hostPID``); elsewhere it
finds none of these ids, and names no pod. Who calls it: ``facts.gpu``, for the presence.

The kubelet puts each pod into a group that has its uid in its name, and the container runtime what it starts
into groups below that one. So the way to a process leads past its pod, however it is spelt:

- ``/kubepods/burstable/pod1a2b…-…/cri-containerd…`` of the driver cgroupfs
- ``/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1a2b…_….slice/crio-….scope`` of systemd
- ``/system.slice/containerd.service/kubepods-burstable-pod1a2b…_….slice:cri-containerd:…`` of both, mixed up
- ``/../../kubepods-pod1a2b…_….slice/…`` as seen from inside another container, with version 2
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
MOST_PROCESSES = 256
"""The most processes of one GPU that are looked up; more are ignored."""
MOST_PODS = 32
"""The most pods of one GPU that are named, so that the presence stays small; seven MIG instances have fewer."""
_LONGEST = 16 * 1024
_LOGIN = b"/user.slice/"
# A static pod's uid in its group is a hash, without dashes.
_POD = re.compile(rb"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:\n]|$)")


def pods_of(pids: Iterable[int], proc: Path | None = None) -> tuple[str, ...]:
    """Return the uids of the pods that these processes belong to, sorted; processes of no pod are left out."""
    uids: set[str] = set()
    for pid, _ in zip(pids, range(MOST_PROCESSES), strict=False):
        uid = _pod_of(pid, proc or PROC)
        if uid is not None:
            uids.add(uid)
    return tuple(sorted(uids)[:MOST_PODS])


def pod_in(groups: bytes) -> str | None:
    """Return the uid in the text of a ``/proc/<pid>/cgroup``, of version 1 or 2.

    The outermost pod is the cluster's: one inside it belongs to a cluster that runs in a pod. The groups of a login
    name none, for the user who has logged in makes them himself and calls them as he likes.
    """
    match = _POD.search(b"\n".join(line for line in groups.split(b"\n") if _LOGIN not in line))
    return match[1].decode().replace("_", "-") if match is not None else None


def _pod_of(pid: int, proc: Path) -> str | None:
    try:
        with (proc / str(pid) / "cgroup").open("rb", buffering=0) as file:
            return pod_in(file.read(_LONGEST))
    except OSError:
        return None  # it has ended, or is not visible from here
