"""Rules, configurations and playbooks on a faster clock, for tests that cannot wait for minutes.

Only durations change, each divided by the same factor. Expressions, thresholds and labels stay as shipped.
`keep_firing_for` does not fall below 15 s: it covers the time of a repair, and jobs and agents repair at their usual
pace. If it were 1 s, an alert would resolve in the middle of a rollback, and the run would skip its next step.
"""

from __future__ import annotations

import re

DURATION = re.compile(
    r"""(?x)
    (?<=\[) \d+[smhd] (?=\])           # a range: metric[5m]
    | (?<=offset\ ) \d+[smhd]\b        # offset 5m
    | (?<=\ for:\ ) \d+[smhd]\b        # how long an alert must hold
    | (?<=keep_firing_for:\ ) \d+[smhd]\b
    | (?<=interval:\ ) \d+[smhd]\b     # of a rule group; scrape_, evaluation_, group_ and repeat_
    | (?<=group_wait:\ ) \d+[smhd]\b
    | (?<=timeout:\ ) \d+[smhd]\b      # of a playbook's step
    | (?<=delay:\ ) \d+[smhd]\b        # before it is tried again
    | (?<=cooldown:\ ) \d+[smhd]\b     # and its guards
    | (?<=per:\ ) \d+[smhd]\b
    """
)
SHORTEST_KEEP_MS = 15_000
_MILLISECONDS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def hasten(text: str, factor: int) -> str:
    """Return `text` with every duration divided by `factor`."""

    def shortened(found: re.Match[str]) -> str:
        written = found.group()
        shipped = int(written[:-1]) * _MILLISECONDS[written[-1]]
        least = min(shipped, SHORTEST_KEEP_MS) if text.endswith("keep_firing_for: ", 0, found.start()) else 0
        return f"{max(least, shipped // factor)}ms"

    return DURATION.sub(shortened, text)
