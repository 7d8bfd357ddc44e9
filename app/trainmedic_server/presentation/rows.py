"""Folding of similar list items into one row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_server.domain.run import Status
from trainmedic_server.presentation import times

Item = Mapping[str, Any]
KeyOf = Callable[[Item], Hashable | None]
_WITHIN = timedelta(hours=1)  # of the newest item of the row


class Row(Struct, frozen=True):
    """An item, and earlier ones like it, newest first."""

    item: Item
    alike: list[Item] = field(default_factory=list)
    has_more: bool = False  # True if items that were not read may belong to it

    @property
    def count(self) -> int:
        return 1 + len(self.alike)

    @property
    def times(self) -> str:
        return f"{self.count}{'+' if self.has_more else ''}"

    @property
    def whose_reason(self) -> str:
        # Of `item`; "" if the row has only one.
        reasons = {each.get("message") for each in (self.item, *self.alike)}
        return f"newest of {len(reasons)} reasons" if len(reasons) > 1 else ""

    @property
    def oldest(self) -> Item:
        return self.alike[-1] if self.alike else self.item


def folded(items: Sequence[Item], key_of: KeyOf | None, at: str, *, is_cut: bool = False) -> list[Row]:
    """Return rows of `items` (newest first). Items of one key within an hour share a row.

    `key_of` returns None to keep an item apart. `at` is the name of the time's field. `is_cut`: older items exist.
    """
    newest: dict[Hashable, Row] = {}
    rows: list[Row] = []
    for item in items:
        key = key_of(item) if key_of else None
        row = newest.get(key) if key is not None else None
        if row is not None and _is_near(row.item[at], item[at]):
            row.alike.append(item)
            continue
        rows.append(Row(item))
        if key is not None:
            newest[key] = rows[-1]
    if not is_cut:
        return rows
    last = items[-1][at]
    return [replace(row, has_more=True) if row.alike and _is_near(row.item[at], last) else row for row in rows]


def refusal_key(item: Item) -> tuple[str, ...] | None:
    """Return the key of a refusal, else None."""
    return (item["playbook"], item["alert_name"], item["decision"]) if item["status"] == Status.NOT_STARTED else None


def _is_near(later: str, earlier: str) -> bool:
    one, other = times.read(later), times.read(earlier)
    return one is not None and other is not None and one - other <= _WITHIN
