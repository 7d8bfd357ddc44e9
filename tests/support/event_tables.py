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


def page() -> str:
    """Return the page with its tables as they have to be: one for each section, in the order of the sections."""
    tables = iter([_table(section) for section in EventKind.__subclasses__()])
    written = _TABLE.sub(lambda _: next(tables), PAGE.read_text(encoding="utf-8"))
    if next(tables, None) is not None:
        raise ValueError(f"{PAGE} has fewer tables than there are sections of events")
    return written


def _table(section: type[EventKind]) -> str:
    rows = [_row(kind) for kind in kinds_of(section)]
    return "".join(["| kind | meaning | `data`; in brackets if given |\n", "|---|---|---|\n", *rows])


def _row(kind: type[EventKind]) -> str:
    meaning = " ".join((kind.__doc__ or "").split())
    always = _listed([field.name for field in fields(kind) if field.required])
    given = _listed([field.name for field in fields(kind) if not field.required])
    return f"| `{name_of(kind)}` | {meaning} | {' '.join(filter(None, [always, f'({given})' if given else '']))} |\n"


def _listed(members: Sequence[str]) -> str:
    return ", ".join(f"`{member}`" for member in members)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
