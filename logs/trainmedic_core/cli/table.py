from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

import click

from trainmedic_core.words import cut, plain

_GAP = 2
_LEAST_WIDTH = 10  # of each column but the last
_LEAST_WIDTH_OF_LAST = 24  # while another column can be cut
_LEAST_SHOWN_OF_LAST = 20  # even if the table becomes wider than the terminal


def width() -> int:
    """Return the width of the terminal or COLUMNS; redirected output is practically unlimited."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return shutil.get_terminal_size().columns if is_known else 10_000


def rows(header: Sequence[str], lines: Sequence[Sequence[object]], width: int) -> list[str]:
    """Return a table within `width` characters if possible: the widest columns are cut first."""
    cells = [list(header), *([plain(value) for value in line] for line in lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    last = min(widths[-1], _LEAST_WIDTH_OF_LAST)
    while sum(widths[:-1]) + _GAP * (len(widths) - 1) + last > width and max(widths[:-1]) > _LEAST_WIDTH:
        widest = max(range(len(widths) - 1), key=lambda column: widths[column])
        widths[widest] -= 1
    return [fit(line, widths, width) for line in cells]


def show(header: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    for line in rows(header, lines, width()):
        click.echo(line)


def fit(cells: Sequence[str], widths: Sequence[int], width: int) -> str:
    padded = [cut(cell, size).ljust(size) for cell, size in zip(cells[:-1], widths[:-1], strict=True)]
    left = (" " * _GAP).join([*padded, ""])
    return (left + cut(cells[-1], max(width - len(left), _LEAST_SHOWN_OF_LAST))).rstrip()
