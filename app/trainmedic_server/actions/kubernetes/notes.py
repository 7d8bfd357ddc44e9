"""Notes on an object: what a run has changed there, and what it was before.

A note is written in the same patch as the change, so that there is never one without the other, and
undoing needs nothing but the object. The annotation ``trainmedic.io/run-<run id>`` holds a JSON
object with a member a field: ``{"unschedulable": {"was": null, "set": true}}``.

Several runs may hold one field. A later one takes over what the field was before the first, and
the value goes back only when the last has gone. Pure functions; `NotedField` says where a value stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainmedic_server.ports.cluster import Object

PREFIX: Final = "trainmedic.io/run-"
FIELD_MANAGER: Final = "trainmedic"
PUT_BACK: Final = "put back"
_LEFT: Final = "changed by somebody else meanwhile: left as it is"

Change = dict[str, Any]
"""A JSON merge patch."""


@dataclass(frozen=True, slots=True)
class NotedField:
    """One value of an object that can be set and put back; None stands for "not there".

    ``read`` gives the present value, ``write`` the merge patch that makes it `value`. ``managed`` is
    the field's path in managedFields, where it is of use to know who set it last.
    """

    name: str
    read: Callable[[Object], Any]
    write: Callable[[Object, Any], Change]
    managed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunNote:
    """What the field was before the first run that holds it, and what this run has set."""

    was: Any
    set: Any


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What taking a run's change back comes to. ``change`` is None where there is nothing to write."""

    change: Change | None
    why: str


def notes(present: Object, field: NotedField) -> dict[str, RunNote]:
    """Return the notes on `field`, by run id. What cannot be read is nobody's."""
    kept: dict[str, RunNote] = {}
    for name, text in (present["metadata"].get("annotations") or {}).items():
        if name.startswith(PREFIX):
            note = _read(text).get(field.name)
            if isinstance(note, Mapping) and {"was", "set"} <= note.keys():
                kept[name.removeprefix(PREFIX)] = RunNote(note["was"], note["set"])
    return kept


def change(present: Object, field: NotedField, value: Any, run_id: str) -> Change | None:
    """Return the patch that sets `field` and notes it for the run; None where somebody else has it so already,
    or where this run has."""
    held = notes(present, field)
    before = field.read(present)
    if run_id in held and before == value == held[run_id].set:
        return None
    if before == value and not held:
        return None  # it was so before: there is nothing of ours to take back
    was = next(iter(held.values())).was if held else before
    return _with_note(present, field, field.write(present, value), run_id, {"was": was, "set": value})


def undo(present: Object, field: NotedField, run_id: str) -> TakenBack:
    """Take the run's note away, and put the value back where nobody else holds or has changed it."""
    held = notes(present, field)
    mine = held.pop(run_id, None)
    if mine is None:
        return TakenBack(None, "nothing of this run's to take back")
    bare = _with_note(present, field, {}, run_id, None)
    if held:
        return TakenBack(bare, f"held by {len(held)} other run{'s' if len(held) > 1 else ''} still")
    if field.read(present) != mine.set or not _is_ours(present, field):
        return TakenBack(bare, _LEFT)
    return TakenBack(_merged(bare, field.write(present, mine.was)), PUT_BACK)


def release(present: Object, field: NotedField) -> TakenBack:
    """Take all runs' notes away and put the value back, as `undo` for every run at once."""
    held = notes(present, field)
    if not held:
        return TakenBack(None, "not set by Trainmedic")
    bare: Change = {}
    for run_id in held:
        bare = _merged(bare, _with_note(present, field, {}, run_id, None))
    oldest = next(iter(held.values()))
    if field.read(present) not in [note.set for note in held.values()] or not _is_ours(present, field):
        return TakenBack(bare, _LEFT)
    return TakenBack(_merged(bare, field.write(present, oldest.was)), PUT_BACK)


def _is_ours(present: Object, field: NotedField) -> bool:
    """Return whether nobody else has set the field since. Where the API server does not say who did, it counts as
    ours."""
    entries = present["metadata"].get("managedFields") or []
    setters = [entry.get("manager") for entry in entries if field.managed and _has(entry.get("fieldsV1"), field)]
    return not setters or FIELD_MANAGER in setters


def _has(tree: Any, field: NotedField) -> bool:
    for part in field.managed:
        tree = tree.get(f"f:{part}") if isinstance(tree, Mapping) else None
    return tree is not None


def _with_note(
    present: Object, field: NotedField, patch: Change, run_id: str, note: Mapping[str, Any] | None
) -> Change:
    """`patch`, and the run's annotation with `note` in it (without it, where None); for this version alone."""
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
    """Both patches in one; they set different things."""
    result = dict(patch)
    for name, value in other.items():
        mine = result.get(name)
        result[name] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return result
