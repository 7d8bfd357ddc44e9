"""Seconds by kind of fault: medians of each phase, as lines of a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.unattended import faults, phases
from benchmarks.unattended.phases import Account

_TO_GOOD = "to good"


def tables(told: Sequence[Account]) -> list[str]:
    """Return the median seconds of each phase by kind, and from the fault to the next good step."""
    ending = [one for one in told if one.kind in faults.ENDING]
    others = [one for one in told if one.kind not in faults.ENDING]
    return [*_table(others, phases.PHASES), *_table(ending, phases.RESTART_PHASES)]


def _table(told: Sequence[Account], columns: Sequence[str]) -> list[str]:
    if not told:
        return []
    lines = [f"{'':22}{''.join(f'{name:>9}' for name in (*columns, _TO_GOOD))}"]
    for kind in sorted({one.kind for one in told}, key=faults.KINDS.index):
        mine = [one for one in told if one.kind == kind]
        cells = [_median([one.seconds[phase] for one in mine if phase in one.seconds]) for phase in columns]
        cells.append(_median([one.seconds_to_good for one in mine if one.seconds_to_good is not None]))
        lines.append(f"{kind:22}{''.join(cells)}")
    return lines


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):9.2f}" if seconds else f"{'-':>9}"
