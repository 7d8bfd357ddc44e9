"""The tables of ``docs/reference/events.md``, made from the kinds of events.

``python -m tests.support.event_tables`` writes them into the page; a test of the reference compares them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import fields

from trainmedic_server.domain.event_codec import kinds_of, name_of
from trainmedic_server.domain.event_kinds import EventKind

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "events.md"
_TABLE = re.compile(r"^\| kind \|.*\n(?:\|.*\n)+", re.MULTILINE)
_LONG = 4
"""Members from which a row names an earlier kind with the same ones instead."""


def page() -> str:
    """Return the page with its tables as they have to be: one for each section, in the order of the sections."""
    tables = iter([_table(section) for section in EventKind.__subclasses__()])
    written = _TABLE.sub(lambda _: next(tables), PAGE.read_text(encoding="utf-8"))
    if next(tables, None) is not None:
        raise ValueError(f"{PAGE} has fewer tables than there are sections of events")
    return written


def _table(section: type[EventKind]) -> str:
    first: dict[str, str] = {}
    rows = []
    for kind in kinds_of(section):
        data, name = _data(kind), name_of(kind)
        earlier = first.setdefault(data, name)
        shown = data if earlier == name or len(fields(kind)) < _LONG else f"as `{earlier}`"
        rows.append(f"| `{name}` | {' '.join((kind.__doc__ or '').split())} | {shown} |\n")
    return "".join(["| kind | meaning | `data`; in brackets if given |\n", "|---|---|---|\n", *rows])


def _data(kind: type[EventKind]) -> str:
    always = _listed([field.name for field in fields(kind) if field.required])
    given = _listed([field.name for field in fields(kind) if not field.required])
    return " ".join(filter(None, [always, f"({given})" if given else ""]))


def _listed(members: Sequence[str]) -> str:
    return ", ".join(f"`{member}`" for member in members)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
