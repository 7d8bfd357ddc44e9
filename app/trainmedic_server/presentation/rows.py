"""Folding of similar list items into one row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from msgspec import Struct, field

from trainmedic_server.domain.run import Status
from trainmedic_server.presentation import times

Item = Mapping[str, Any]
Says = Callable[[Item], Hashable | None]
_WITHIN = timedelta(hours=1)


class Row(Struct, frozen=True):
    """An item, and later ones like it, newest first."""

    item: Item
    alike: list[Item] = field(default_factory=list)

    @property
    def count(self) -> int:
        return 1 + len(self.alike)

    @property
    def oldest(self) -> Item:
        return self.alike[-1] if self.alike else self.item


def folded(items: Iterable[Item], says: Says | None, at: str) -> list[Row]:
    """Return rows of `items` (newest first). Equal items within an hour share a row.

    `says` returns the value to compare, or None to keep an item apart. `at` names the time.
    """
    newest: dict[Hashable, Row] = {}
    rows: list[Row] = []
    for item in items:
        said = says(item) if says else None
        row = newest.get(said) if said is not None else None
        if row is not None and _is_near(row.item[at], item[at]):
            row.alike.append(item)
            continue
        rows.append(Row(item))
        if said is not None:
            newest[said] = rows[-1]
    return rows


def refusal(item: Item) -> tuple[str, ...] | None:
    """Return None for a run."""
    return (item["playbook"], item["alert_name"], item["decision"]) if item["status"] == Status.NOT_STARTED else None


def _is_near(later: str, earlier: str) -> bool:
    one, other = times.read(later), times.read(earlier)
    return one is not None and other is not None and one - other <= _WITHIN
