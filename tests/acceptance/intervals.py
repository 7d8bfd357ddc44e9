"""Rules, configurations and playbooks on a faster clock, for tests that cannot wait for minutes.

Only durations change, each divided by the same factor; expressions, thresholds and labels stay as shipped.
A test in ``test_intervals.py`` holds this module to that.
"""

from __future__ import annotations

import re

DURATION = re.compile(
    r"""(?x)
    (?<=\[) \d+[smhd] (?=\])           # a range: metric[5m]
    | (?<=offset\ ) \d+[smhd]\b        # offset 5m
    | (?<=for:\ ) \d+[smhd]\b          # how long an alert must hold, and is held (keep_firing_for)
    | (?<=interval:\ ) \d+[smhd]\b     # of a rule group; scrape_, evaluation_, group_ and repeat_
    | (?<=group_wait:\ ) \d+[smhd]\b
    | (?<=timeout:\ ) \d+[smhd]\b      # of a playbook's step
    | (?<=delay:\ ) \d+[smhd]\b        # before it is tried again
    | (?<=cooldown:\ ) \d+[smhd]\b     # and its guards
    | (?<=per:\ ) \d+[smhd]\b
    """
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def hasten(text: str, factor: int) -> str:
    """`text` with every duration divided by `factor`."""

    def shortened(found: re.Match[str]) -> str:
        written = found.group()
        return f"{int(written[:-1]) * _SECONDS[written[-1]] * 1000 // factor}ms"

    return DURATION.sub(shortened, text)
