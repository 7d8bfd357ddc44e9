"""Changes of runs to a Kubernetes object, recorded in its annotations, and their undo. Pure.

The patch includes the record. The annotation ``trainmedic.io/run-<run id>`` is a JSON object with a member for each
field: ``{"unschedulable": {"was": null, "set": true}}``. If several runs change one field, each records the value
before the first; the last undo restores it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from trainmedic_server.ports.cluster import Object

PREFIX: Final = "trainmedic.io/run-"
FIELD_MANAGER: Final = "trainmedic"  # of the patches that `adapters.kubernetes_cluster` sends
PUT_BACK: Final = "put back"
_LEFT: Final = "changed by another party since: left unchanged"

Change = dict[str, Any]


class RevertibleField(Struct, frozen=True):
    """``read`` returns None if unset, ``write`` a merge patch. ``managed`` is the path in managedFields, if its last
    setter matters.
    """

    name: str
    read: Callable[[Object], Any]
    write: Callable[[Object, Any], Change]
    managed: tuple[str, ...] = ()


class RunChange(Struct, frozen=True):
    """``was`` is the value before the first run changed it."""

    was: Any
    set: Any


class Reversal(Struct, frozen=True):
    change: Change | None
    why: str


def changes_by_run(present: Object, field: RevertibleField) -> dict[str, RunChange]:
    kept: dict[str, RunChange] = {}
    for name, text in (present["metadata"].get("annotations") or {}).items():
        if name.startswith(PREFIX):
            note = _read(text).get(field.name)
            if isinstance(note, Mapping) and {"was", "set"} <= note.keys():
                kept[name.removeprefix(PREFIX)] = RunChange(note["was"], note["set"])
    return kept


def change(present: Object, field: RevertibleField, value: Any, run_id: str) -> Change | None:
    """Return None if the field has the value already, set by this run or without a record."""
    changes = changes_by_run(present, field)
    before = field.read(present)
    if run_id in changes and before == value == changes[run_id].set:
        return None
    if before == value and not changes:
        return None  # It had the value before, so there is nothing to undo later.
    was = next(iter(changes.values())).was if changes else before
    return _with_annotation(present, field, field.write(present, value), run_id, {"was": was, "set": value})


def undo(present: Object, field: RevertibleField, run_id: str) -> Reversal:
    """Restore the value unless another run or another party has set it."""
    changes = changes_by_run(present, field)
    own = changes.pop(run_id, None)
    if own is None:
        return Reversal(None, "this run has nothing to revert")
    bare = _with_annotation(present, field, {}, run_id, None)
    if changes:
        return Reversal(bare, f"still held by {len(changes)} other run{'s' if len(changes) > 1 else ''}")
    if field.read(present) != own.set or not _is_ours(present, field):
        return Reversal(bare, _LEFT)
    return Reversal(_merged(bare, field.write(present, own.was)), PUT_BACK)


def undo_for_all_runs(present: Object, field: RevertibleField) -> Reversal:
    changes = changes_by_run(present, field)
    if not changes:
        return Reversal(None, "not set by Trainmedic")
    bare: Change = {}
    for run_id in changes:
        bare = _merged(bare, _with_annotation(present, field, {}, run_id, None))
    any_change = next(iter(changes.values()))  # all have the same ``was``
    if field.read(present) not in [change.set for change in changes.values()] or not _is_ours(present, field):
        return Reversal(bare, _LEFT)
    return Reversal(_merged(bare, field.write(present, any_change.was)), PUT_BACK)


def _is_ours(present: Object, field: RevertibleField) -> bool:
    """Return whether Trainmedic set the field. True if the API server does not state who did."""
    entries = present["metadata"].get("managedFields") or []
    setters = [entry.get("manager") for entry in entries if field.managed and _has(entry.get("fieldsV1"), field)]
    return not setters or FIELD_MANAGER in setters


def _has(tree: Any, field: RevertibleField) -> bool:
    for part in field.managed:
        tree = tree.get(f"f:{part}") if isinstance(tree, Mapping) else None
    return tree is not None


def _with_annotation(
    present: Object, field: RevertibleField, patch: Change, run_id: str, note: Mapping[str, Any] | None
) -> Change:
    name = PREFIX + run_id
    members = _read((present["metadata"].get("annotations") or {}).get(name, "{}"))
    members.pop(field.name, None)
    if note is not None:
        members[field.name] = dict(note)
    text = json.dumps(members, sort_keys=True, separators=(",", ":")) if members else None
    metadata = {"resourceVersion": present["metadata"]["resourceVersion"], "annotations": {name: text}}
    return _merged(patch, {"metadata": metadata})


def _read(text: Any) -> dict[str, Any]:
    try:
        members = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return {}
    return members if isinstance(members, dict) else {}


def _merged(patch: Change, other: Change) -> Change:
    result = dict(patch)
    for name, value in other.items():
        own = result.get(name)
        result[name] = _merged(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return result
