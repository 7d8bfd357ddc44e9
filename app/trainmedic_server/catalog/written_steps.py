"""Lists of steps in a playbook's document, by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from trainmedic_core.problems import DocumentPath
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_server.domain.playbook import ON_LIMITED, PHASES, default_id


def lists(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((phase, raw.get(phase)) for phase in PHASES)
    guards = raw.get("guards")
    yield ON_LIMITED, (guards.get(ON_LIMITED) if isinstance(guards, dict) else None)


def with_limited(document: YamlDocument) -> YamlDocument:
    """Add the positions of ``guards.on_limited`` as those of a phase."""
    place: DocumentPath = ("guards", ON_LIMITED)
    if place not in document.marks:
        return document
    marks, keys, remarks = dict(document.marks), dict(document.keys), dict(document.remarks)
    for path, mark in document.marks.items():
        if path[:2] == place:
            marks[path[1:]] = mark
    for path, mark in document.keys.items():
        if path[:2] == place:
            keys[path[1:]] = mark
    return replace(document, marks=marks, keys=keys, remarks=remarks)


def id_of(entry: Any, index: int, phase: str) -> str:
    own = entry.get("id") if isinstance(entry, dict) else None
    if isinstance(own, str) and own:
        return own
    return default_id(index, phase)
