"""Cached reading of one part of each presence.

Parsing the locations of 100,000 ranks is slow, so it runs only for changed parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from trainmedic_server.ports.outside import Presence

T = TypeVar("T")


class PartReader(Generic[T]):
    """`read` converts a presence by its member `part`, in a thread."""

    def __init__(self, part: str, read: Callable[[Presence], T]) -> None:
        self._part = part
        self._read = read
        self._known: Mapping[str, tuple[Any, T]] = {}

    async def changed(self, presences: Sequence[Presence]) -> Mapping[str, T] | None:
        """Return results by name; None if unchanged since the last call."""
        before, part = self._known, self._part
        changed = [  # an unchanged part stays the same object
            each for each in presences if each.name not in before or before[each.name][0] is not each.details.get(part)
        ]
        if not changed and len(presences) == len(before):
            return None
        new = await asyncio.to_thread(self._read_all, changed)
        self._known = {each.name: new.get(each.name) or before[each.name] for each in presences}
        return {name: value for name, (_, value) in self._known.items()}

    def _read_all(self, presences: Sequence[Presence]) -> dict[str, tuple[Any, T]]:
        return {each.name: (each.details.get(self._part), self._read(each)) for each in presences}
