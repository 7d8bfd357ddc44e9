"""Slurm's JSON, shortened to the named fields of its records. Other values are skipped, not decoded: they are 95 %."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from trainmedic_agent.errors import CommandRejected

_FIELD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MOST_FIELDS = 64


class Document(Struct, frozen=True):
    raw: bytes
    """``meta``, ``errors`` and the records."""
    digest: str
    """Hash of records and errors."""
    has_errors: bool
    is_empty: bool
    is_dated: bool
    """Whether slurmctld stated when the records were updated."""


def shortened(output: bytes, kind: str, fields: Sequence[str]) -> Document | None:
    """Keep these fields of the records (`kind`), or of a single one. Return None for other output.

    Raises CommandRejected.
    """
    if len(fields) > _MOST_FIELDS or not all(_FIELD.fullmatch(field) for field in fields):
        raise CommandRejected(f"fields must be at most {_MOST_FIELDS} names of Slurm's JSON")
    try:
        answer: Any = msgspec.json.decode(output, type=_answer_type(kind, tuple(dict.fromkeys(fields))))
        listed = answer.records if isinstance(answer.records, list) else [answer.records]
        records = msgspec.json.encode(listed)
        errors = msgspec.json.encode(answer.errors)
        release = msgspec.json.encode(_release(answer.meta))
    except (msgspec.DecodeError, RecursionError):
        return None
    raw = b'{"meta":' + release + b',"errors":' + errors + b',"' + kind.encode() + b'":' + records + b"}"
    digest = hashlib.sha256(records + errors).hexdigest()[:16]
    updated = answer.last_update.get("number") if isinstance(answer.last_update, dict) else None
    return Document(raw, digest, bool(answer.errors), not listed, bool(updated))


def _release(meta: Any) -> Any:
    """Keep Slurm's release: the rest of ``meta`` differs between two calls."""
    # Older data parsers write a capital letter.
    slurm = meta.get("slurm") or meta.get("Slurm") if isinstance(meta, dict) else None
    release = slurm.get("release") if isinstance(slurm, dict) else None
    return {"slurm": {"release": release}}


@lru_cache(maxsize=16)
def _answer_type(kind: str, fields: tuple[str, ...]) -> Any:
    # Numbered names, because a field may be a keyword of Python.
    names = {f"field_{number}": field for number, field in enumerate(fields)}
    record: Any = msgspec.defstruct("Record", [(name, Raw | UnsetType, UNSET) for name in names], rename=names)
    members: list[tuple[str, Any, Any]] = [("errors", list[Any] | None, None), ("meta", Any, None)]
    members.append(("last_update", Any, None))
    return msgspec.defstruct("Answer", [("records", list[record] | record), *members], rename={"records": kind})
