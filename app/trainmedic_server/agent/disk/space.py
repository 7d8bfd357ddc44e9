"""How much is free on the filesystems that a cleaning works on, and whether the target is reached there.

Free is what an unprivileged process may still use, as a share of the whole: node_exporter's
``node_filesystem_avail_bytes / node_filesystem_size_bytes``, on which alerts are written.

A trial run frees nothing, so there the bytes that it would have freed are added. Some filesystems (ZFS,
btrfs) give space back some seconds after a deletion; where what was deleted should be enough and the
filesystem does not show it yet, it is given a moment, so that no more is deleted than needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainmedic_server.agent.disk.pace import Pace

_PATIENCE = 20
_MOMENT = 0.3
"""Seconds; ZFS frees within about five."""
_MOST_WAITS = 2
"""Times that a filesystem is waited for: if it shows less even so, somebody else fills it."""


@dataclass(frozen=True, slots=True)
class Space:
    """Free and total bytes of a filesystem."""

    free: int
    total: int

    @property
    def percent(self) -> float:
        return 100 * self.free / self.total if self.total else 100.0

    def plus(self, freed: int) -> Space:
        return Space(min(self.free + freed, self.total), self.total)


Measure = Callable[[int], Space]


def measured(fd: int) -> Space:
    """The space on the filesystem of an open file. Raises OSError."""
    facts = os.fstatvfs(fd)
    return Space(facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize)


@dataclass(slots=True)
class Filesystem:
    """One filesystem, from the first root on it that was opened; ``freed`` by this cleaning."""

    root: str
    fd: int
    before: Space
    after: Space
    freed: int = 0
    waits: int = 0


class Filesystems:
    """All of one cleaning, by device number; each is kept open until `close`.

    `target` is the percentage to reach, None for no end.
    """

    def __init__(self, measure: Measure, target: float | None, *, dry_run: bool, pace: Pace) -> None:
        self._measure = measure
        self._target = target
        self._dry_run = dry_run
        self._pace = pace
        self._known: dict[int, Filesystem] = {}

    def seen(self, device: int, fd: int, root: str) -> None:
        """A root on `device` is open. Raises OSError."""
        if device not in self._known:
            space = self._measure(fd)
            self._known[device] = Filesystem(root, os.dup(fd), space, space)

    def close(self) -> None:
        for here in self._known.values():
            os.close(here.fd)

    def freed(self, device: int, size: int) -> None:
        self._known[device].freed += size

    def now(self, device: int) -> Space:
        """The space there; in a trial run, as it would be."""
        here = self._known[device]
        here.after = here.before.plus(here.freed) if self._dry_run else self._measure(here.fd)
        return here.after

    def has_enough(self, device: int) -> bool:
        """Whether the target is reached there."""
        if self._target is None:
            return False
        if self.now(device).percent >= self._target:
            return True
        here = self._known[device]
        if self._dry_run or here.before.plus(here.freed).percent < self._target or here.waits >= _MOST_WAITS:
            return False
        here.waits += 1
        for _ in range(_PATIENCE):
            self._pace.wait(_MOMENT)
            if self.now(device).percent >= self._target:
                return True
            if not self._pace.goes_on():
                break
        return False

    def output(self) -> Mapping[str, Any]:
        """Each filesystem's part of the output, and the least free of them before and after."""
        every = [self._told(device) for device in self._known]
        if not every:
            return {"filesystems": []}
        return {
            "free_percent_before": min(one["free_percent_before"] for one in every),
            "free_percent_after": min(one["free_percent_after"] for one in every),
            **({} if self._target is None else {"reached": all(one["reached"] for one in every)}),
            "filesystems": every,
        }

    def _told(self, device: int) -> dict[str, Any]:
        here, after = self._known[device], self.now(device)
        return {
            "root": here.root,
            "total_bytes": here.before.total,
            "free_bytes_before": here.before.free,
            "free_percent_before": round(here.before.percent, 2),
            "free_bytes_after": after.free,
            "free_percent_after": round(after.percent, 2),
            **({} if self._target is None else {"reached": after.percent >= self._target}),
        }
