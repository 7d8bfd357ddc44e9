"""Parts of presences that are read again only where they have changed."""

from __future__ import annotations

from typing import Any

from tests.support.clocks import START
from trainmedic_server.engine.read_parts import PartReader
from trainmedic_server.ports.outside import Presence


async def test_only_what_has_changed_is_read() -> None:
    """Who is new, and who says something else; who has gone is not in the answer, and nothing new is None."""
    read: list[str] = []

    def look(presence: Presence) -> int:
        read.append(presence.name)
        return len(presence.details.get("parts", ()))

    def present(**parts: Any) -> list[Presence]:
        return [Presence(name, START, {"parts": told, "at": object()}) for name, told in parts.items()]

    parts, one, two = PartReader("parts", look), [1], [1, 2]
    assert await parts.changed([]) is None
    assert await parts.changed(present(a=one, b=two)) == {"a": 1, "b": 2}
    assert await parts.changed(present(a=one, b=two)) is None
    assert await parts.changed(present(a=one, b=[])) == {"a": 1, "b": 0}
    assert await parts.changed([*present(a=one), Presence("c", START)]) == {"a": 1, "c": 0}
    assert await parts.changed(present(a=one)) == {"a": 1}
    assert read == ["a", "b", "b", "c"]
