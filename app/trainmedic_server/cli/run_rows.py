"""The rows of a table of runs: what became of each in a word, what it did, and rows that say the same folded into one.
Pure. Who calls it: ``history``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, field

from trainmedic_server.cli import ages, story, table
from trainmedic_server.domain.run import Status

Item = Mapping[str, Any]

HEADER = ("WHEN", "RUN", "ALERT", "PLAYBOOK", "TARGET", "RESULT", "TOOK", "WHAT")
_FOLDED_WITHIN = timedelta(hours=1)
_WAITS = {
    "target": "waits: target",
    "resolved": "waits: alert",
    "retry": "waits: retry",
    "resume": "waits: resume",
    "approval": "asks",
}


class Row(Struct):
    """One row: an item, and how many others say the same."""

    item: Item
    targets: set[str] = field(default_factory=set)
    others: int = 0


def folded(items: Iterable[Item]) -> list[Row]:
    """The rows of these items, the newest first: decisions not to start that have playbook, alert and reason in common
    are one row where they were made within an hour."""
    newest: dict[tuple[str, ...], Row] = {}
    rows: list[Row] = []
    for item in items:
        key = (str(item["playbook"]), str(item["alert_name"]), str(item["decision"]))
        row = newest.get(key) if item["status"] == Status.NOT_STARTED else None
        if row is not None and _at(row.item) - _at(item) <= _FOLDED_WITHIN:
            row.others += 1
            row.targets.add(str(item["target"]))
            continue
        row = Row(item, {str(item["target"])})
        if item["status"] == Status.NOT_STARTED:
            newest[key] = row
        rows.append(row)
    return rows


def cells(row: Row, at: str) -> tuple[object, ...]:
    """The cells of a row under `HEADER`, with ages as of `at`."""
    item = row.item
    target = f"{len(row.targets)} targets" if len(row.targets) > 1 else item["target"]
    return (
        ages.age(item["timestamp"], at),
        f"×{row.others + 1}" if row.others else table.short_id(item["run_id"]),
        item["alert_name"],
        item["playbook"],
        target,
        result(item),
        "-" if item["status"] == Status.NOT_STARTED else story.span(item.get("duration_ms")),
        what(item),
    )


def result(item: Item) -> str:
    """What became of it in a word: what it waits for while it is open, and what of it is to be taken back, or was."""
    status = str(item["status"])
    if status == Status.WAITING:
        return _WAITS.get(str(item.get("waiting_on")), "waits")
    if status == Status.AWAITING_APPROVAL:
        return "asks"
    word = "held back" if status == Status.NOT_STARTED else status
    if item.get("undone_at"):
        return f"{word}, undone"
    return f"{word}, owes" if item.get("owes_undo") and status not in (Status.RUNNING,) else word


def what(item: Item) -> str:
    """Why nothing began, or what was done and how it ended; nothing twice."""
    action, message = item.get("action_taken"), item.get("message") or ""
    if item["status"] == Status.NOT_STARTED:
        return ": ".join(filter(None, (str(item["decision"]), message)))
    if item["status"] == Status.FAILED:
        return f"{message}; did {action}" if action else message or "-"
    if not action or action in message:
        return message or "-"
    return ": ".join(filter(None, (action, message)))


def _at(item: Item) -> datetime:
    return datetime.fromisoformat(item["timestamp"])
