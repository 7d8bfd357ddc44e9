"""Plain text for a terminal: aligned columns, and text from outside made harmless."""

from __future__ import annotations

from collections.abc import Sequence

from trainmedic_server.domain.plain_text import visible

_SHORT_ID = 8


def plain(value: object) -> str:
    """`value` on one line, without control characters: label values must not steer a terminal."""
    if value is None:
        return "-"
    return visible(str(value).replace("\n", " ⏎ "))


def short_id(run_id: object) -> str:
    """The end of a run's id, which its commands take: ids of one second have their beginnings alike."""
    return plain(run_id)[-_SHORT_ID:]


def rows(header: Sequence[str], lines: Sequence[Sequence[object]], width: int) -> list[str]:
    """`lines` under `header`, columns as wide as they need; the last column is cut at `width`."""
    cells = [[plain(value) for value in line] for line in lines]
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    return [fit(line, widths, width) for line in [list(header), *cells]]


def fit(cells: Sequence[str], widths: Sequence[int], width: int) -> str:
    """One line of a table."""
    padded = [cell.ljust(size) for cell, size in zip(cells[:-1], widths[:-1], strict=True)]
    left = "  ".join([*padded, ""])
    room = max(width - len(left), 20)
    last = cells[-1] if len(cells[-1]) <= room else cells[-1][: room - 1] + "…"
    return (left + last).rstrip()
