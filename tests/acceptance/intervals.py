"""Rules, configurations and playbooks on a faster clock, for tests that cannot wait for minutes.

Only durations change, each divided by the same factor. Expressions, thresholds and labels stay as shipped.
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
_MILLISECONDS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def hasten(text: str, factor: int, least_keep_ms: int = 0) -> str:
    """Return `text` with every duration divided by `factor`.

    `keep_firing_for` does not fall below `least_keep_ms`, unless it is less in `text`. It covers the time of a repair,
    and a job repairs at its usual pace: if an alert resolves in the middle of a rollback, the run skips its next step.
    """

    def shortened(found: re.Match[str]) -> str:
        written = found.group()
        shipped = int(written[:-1]) * _MILLISECONDS[written[-1]]
        least = min(shipped, least_keep_ms) if text.endswith("keep_firing_for: ", 0, found.start()) else 0
        return f"{max(least, shipped // factor)}ms"

    return DURATION.sub(shortened, text)
