"""Steps in a playbook's YAML document, before it is validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmedic_server.domain.playbook import default_id, place_of


def of(raw: Any, phase: str) -> Sequence[Any]:
    """Return the entries of a phase, which may be invalid; none if it is no list."""
    for key in place_of(phase):
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw if isinstance(raw, list) else ()


def with_lists(raw: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    changed = dict(raw)
    for phase, steps in lists.items():
        first, *rest = place_of(phase)
        changed[first] = {**raw[first], phase: steps} if rest else steps
    return changed


def id_of(entry: Any, index: int, phase: str) -> str:
    own = entry.get("id") if isinstance(entry, dict) else None
    if isinstance(own, str) and own:
        return own
    return default_id(index, phase)
