"""Pauses ordered by operators. Times are aware UTC."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core import duration


class Scope(Struct, frozen=True):
    """Runs that meet all given conditions. All but `labels` are shell patterns."""

    playbook: str | None = None
    node: str | None = None
    """For nodes that the run touches, by its targets or its steps."""
    job: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_everything(self) -> bool:
        return not (self.playbook or self.node or self.job or self.labels)

    def __str__(self) -> str:
        parts = [(name, getattr(self, name)) for name in ("playbook", "node", "job")]
        words = [f"{name} {pattern}" for name, pattern in parts if pattern]
        words += [f"label {name}={value}" for name, value in sorted(self.labels.items())]
        return ", ".join(words) or "everything"

    def covers(self, playbook: str, nodes: Collection[str], jobs: Collection[str], labels: Mapping[str, str]) -> bool:
        return (
            (self.playbook is None or fnmatch.fnmatchcase(playbook, self.playbook))
            and (self.node is None or any(fnmatch.fnmatchcase(node, self.node) for node in nodes))
            and (self.job is None or any(fnmatch.fnmatchcase(job, self.job) for job in jobs))
            and all(labels.get(name) == value for name, value in self.labels.items())
        )


EVERYTHING = Scope()


class OperatorPause(Struct, frozen=True):
    id: str
    by: str
    at: datetime
    starts_at: datetime
    ends_at: datetime | None = None
    """End of the pause or its first window. None: a person ends it."""
    every: timedelta | None = None  # interval between starts of windows
    scope: Scope = EVERYTHING
    note: str = ""
    observe: bool = False
    """True if covered runs are recorded as in mode observe, not held."""

    def window(self, now: datetime) -> tuple[datetime, datetime | None] | None:
        """Return the present or next window, None if over. An end of None is open."""
        if self.ends_at is None or now < self.ends_at:
            return self.starts_at, self.ends_at
        if self.every is None:
            return None
        length = self.ends_at - self.starts_at
        begins = self.starts_at + ((now - self.starts_at) // self.every) * self.every
        if now >= begins + length:
            begins += self.every
        return begins, begins + length

    def is_in_force(self, now: datetime) -> bool:
        """Return whether it is active, even if the clock was set back to before the order."""
        window = self.window(now)
        return window is not None and window[0] <= max(now, self.at)

    def is_over(self, now: datetime) -> bool:
        return self.window(now) is None

    def until(self, now: datetime) -> datetime | None:
        window = self.window(now)
        return window[1] if window is not None else None

    def without_this_window(self, now: datetime) -> OperatorPause | None:
        """Return the pause from its next window on; None without one."""
        window = self.window(now)
        if self.every is None or window is None or window[1] is None:
            return None
        return replace(self, starts_at=window[0] + self.every, ends_at=window[1] + self.every)

    def why(self, now: datetime) -> str:
        what = "observe only, said" if self.observe else "paused"
        scope = "" if self.scope.is_everything or self.observe else f" for {self.scope}"
        end = self.until(now)
        until = f" until {end:%Y-%m-%d %H:%M:%SZ}" if end else ""
        return f"{what} by {self.by}{scope}{until}" + (f": {self.note}" if self.note else "")

    def as_data(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "by": self.by,
            "at": self.at.isoformat(),
            "starts_at": self.starts_at.isoformat(),
            "ends_at": self.ends_at.isoformat() if self.ends_at else None,
            "every": duration.write(self.every) if self.every else None,
            "playbook": self.scope.playbook,
            "node": self.scope.node,
            "job": self.scope.job,
            "labels": dict(self.scope.labels),
            "note": self.note,
            "observe": self.observe,
        }

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> OperatorPause:
        return cls(
            id=data["id"],
            by=data["by"],
            at=datetime.fromisoformat(data["at"]),
            starts_at=datetime.fromisoformat(data["starts_at"]),
            ends_at=datetime.fromisoformat(data["ends_at"]) if data["ends_at"] else None,
            every=duration.parse(data["every"]) if data["every"] else None,
            scope=Scope(data["playbook"], data["node"], data["job"], data["labels"]),
            note=data["note"],
            observe=data["observe"],
        )


class PauseOrder(Struct, frozen=True):
    """Order of a pause, by default from now on until a person ends it."""

    scope: Scope = EVERYTHING
    note: str = ""
    starts_at: datetime | None = None
    length: timedelta | None = None
    every: timedelta | None = None
    observe: bool = False
