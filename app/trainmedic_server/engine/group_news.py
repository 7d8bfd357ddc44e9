"""News of members for the driver of their parent run."""

from __future__ import annotations

from collections.abc import Callable

from trainmedic_server.domain.group import Member
from trainmedic_server.domain.run import Run


class GroupNews:
    def __init__(self) -> None:
        self._listeners: dict[str, Callable[[Member], None]] = {}

    def follow(self, parent: str, listener: Callable[[Member], None]) -> None:
        self._listeners[parent] = listener

    def leave(self, parent: str) -> None:
        self._listeners.pop(parent, None)

    def tell(self, run: Run, before: Run) -> None:
        """Pass on a member's change, if it changes what the parent counts."""
        listener = self._listeners.get(run.parent) if run.parent is not None else None
        if listener is not None and Member.of(run) != Member.of(before):
            listener(Member.of(run))
