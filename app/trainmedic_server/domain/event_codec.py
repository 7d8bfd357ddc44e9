"""Conversion between `Event` and its typed content.

Missing or mistyped members of other releases' rows read as their default, or None. Unknown members stay in
`Event.data` only. The content is None if a required member is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any

import msgspec
from msgspec import NODEFAULT
from msgspec.structs import asdict, fields

from trainmedic_server.domain import group_events as group_events  # defines kinds, as wait_events does
from trainmedic_server.domain import wait_events as wait_events
from trainmedic_server.domain.event_kinds import Decided, EventKind, UndoClosed, UndoDone
from trainmedic_server.domain.run import Decision, Event


def kinds_of(parent: type[EventKind]) -> Iterator[type[EventKind]]:
    """Yield the kinds below `parent`: classes without subclasses."""
    sections = parent.__subclasses__()
    for section in sections:
        yield from kinds_of(section)
    if not sections:
        yield parent


def name_of(kind: type[EventKind]) -> str:
    return str(kind.__struct_config__.tag)


def names(*parents: type[EventKind]) -> frozenset[str]:
    return frozenset(name_of(kind) for parent in parents for kind in kinds_of(parent))


EVENT_KINDS: Mapping[str, type[EventKind]] = {name_of(each): each for each in kinds_of(EventKind)}
DECIDED: Mapping[Decision, type[Decided]] = {
    decision: kind for decision in Decision if issubclass(kind := EVENT_KINDS.get(decision, EventKind), Decided)
}
"""`joined` has another kind, `duplicate` none."""
UNDO_OVER = names(UndoDone, UndoClosed)  # kinds after which an undo is no longer pending


def recorded(content: EventKind, at: datetime, run_id: str | None = None, actor: str = "trainmedic") -> Event:
    """Return the event to store, without members that equal their default."""
    name, _, defaults = _members(content.__class__)
    data = asdict(content)
    for member, default in defaults:
        if data[member] == default:
            del data[member]
    for member, value in data.items():
        if value.__class__ not in _JSON_TYPES:
            data[member] = _as_json(value)
    return Event(name, at, run_id, actor, data)


def content_of(event: Event) -> EventKind | None:
    """Return the content of an event. None for an unknown kind or an unreadable required member."""
    kind = EVENT_KINDS.get(event.kind)
    if kind is None:
        return None
    _, required, _ = _members(kind)
    try:
        return msgspec.convert({**required, **event.data}, kind)
    except msgspec.ValidationError:
        pass  # rare: find the readable members below
    readable = {
        field.name: event.data[field.name]
        for field in fields(kind)
        if field.name in event.data and _fits(event.data[field.name], field.type)
    }
    try:
        return msgspec.convert({**required, **readable}, kind)
    except msgspec.ValidationError:
        return None


def _fits(value: Any, type_: Any) -> bool:
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError:
        return False
    return True


@cache
def _members(kind: type[EventKind]) -> tuple[str, Mapping[str, None], Sequence[tuple[str, Any]]]:
    required = {field.name: None for field in fields(kind) if field.required}
    defaults = [
        (field.name, field.default if field.default is not NODEFAULT else {})
        for field in fields(kind)
        if not field.required
    ]
    return name_of(kind), required, defaults


_JSON_TYPES = frozenset({str, int, float, bool, dict, list, type(None)})


def _as_json(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case StrEnum():
            return str(value)
        case Mapping():
            return dict(value)
        case tuple():
            return list(value)
        case _:
            return value
