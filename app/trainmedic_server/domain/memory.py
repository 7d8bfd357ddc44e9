"""A playbook's earlier runs on a target."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from trainmedic.wire.envelope import read_time, write_time


class LastRun(Struct, frozen=True):
    """Times are aware UTC."""

    id: str
    status: str
    at: datetime  # start of its first changing step
    ended_at: datetime | None = None
    message: str = ""

    def as_data(self) -> dict[str, Any]:
        ended_at = None if self.ended_at is None else self.ended_at.timestamp()
        return {**asdict(self), "at": self.at.timestamp(), "ended_at": ended_at}


LAST = LastRun.__struct_fields__  # members of `runs.last` in expressions


class _NoRun(dict[str, Any]):
    """False in a condition, with members that are none."""

    def __bool__(self) -> bool:
        return False


_NONE: Mapping[str, Any] = _NoRun.fromkeys(LAST)


class RunMemory(Struct, frozen=True):
    """Earlier runs that began a changing step, as of the admission. ``counts`` are by period (``1d``)."""

    counts: Mapping[str, int] = field(default_factory=dict)
    last: LastRun | None = None

    def last_data(self) -> Mapping[str, Any]:  # for expressions; times as Unix seconds
        return _NONE if self.last is None else self.last.as_data()

    def as_json(self) -> dict[str, Any]:  # for the store
        last = self.last
        written = {} if last is None else {
            "id": last.id, "status": last.status, "at": write_time(last.at), "message": last.message,
            "ended_at": None if last.ended_at is None else write_time(last.ended_at),
        }  # fmt: skip
        return {"counts": dict(self.counts), "last": written}


def of_json(written: Mapping[str, Any]) -> RunMemory:
    last = dict(written["last"])
    if not last:
        return RunMemory(written["counts"])
    ended_at = last["ended_at"]
    last["at"], last["ended_at"] = read_time(last["at"]), None if ended_at is None else read_time(ended_at)
    return RunMemory(written["counts"], LastRun(**last))
