"""Prometheus durations (``90s``, ``10m``, ``1h30m``)."""

from __future__ import annotations

import re
from datetime import timedelta

# Grammar and units of Prometheus (common/model/time.go): each unit at most once, largest first; 1 y is 365 d.
PATTERN = r"^(?=.)(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?$"
_UNITS = {
    "y": timedelta(days=365),
    "w": timedelta(weeks=1),
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
_GRAMMAR = re.compile(PATTERN)
_PART = re.compile(r"(\d+)(ms|[ywdhms])")
# Units that a person may write out, but not months and microseconds.
_LONG_PART = re.compile(
    r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(ms|milli|[ywdhs]|m(?!o|ic))[a-z]*\s*",
    re.IGNORECASE,
)

LONGEST = timedelta(weeks=365_000)  # 7,000 years: added to a time, it ends before the year 9999
LONGEST_BACK = timedelta(days=365_000)  # 1,000 years: subtracted from a time, it begins after the year 1


def check_back(value: timedelta) -> timedelta:
    if value > LONGEST_BACK:
        raise ValueError(f"{write(value)} is too long; write at most {write(LONGEST_BACK)}")
    return value


def parse(text: str) -> timedelta:
    """Raises ValueError, also if it is longer than `LONGEST`."""
    if text == "0":
        return timedelta(0)
    if not _GRAMMAR.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration; {_suggestion(text)}")
    try:
        value = sum((int(count) * _UNITS[unit] for count, unit in _PART.findall(text)), timedelta(0))
    except (OverflowError, ValueError):  # too many digits
        value = timedelta.max
    if value > LONGEST:
        raise ValueError(f"{text!r:.60} is too long; write at most {write(LONGEST)}")
    return value


def _suggestion(text: str) -> str:
    at, total = 0, timedelta(0)
    while at < len(text) <= 40 and (part := _LONG_PART.match(text, at)):
        unit = part[2].lower()
        try:
            total += float(part[1]) * _UNITS["ms" if unit == "milli" else unit]
        except OverflowError:
            return "it is too long"
        at = part.end()
    if at == len(text) and total:
        return f"write {write(total)}"
    if "{{" in text:
        return "no template is possible here: 90s, 10m, 1h30m"
    return "write it as Prometheus does: 90s, 10m, 1h30m"


def write_rounded(value: timedelta) -> str:
    """Format for display, rounded up."""
    # An excess over a limit must not look like the limit.
    step = timedelta(minutes=1) if value >= timedelta(days=1) else timedelta(seconds=1)
    return write(-(-value // step) * step)


def write(value: timedelta) -> str:
    """Return the duration in units from days down to milliseconds, rounded to milliseconds."""
    if value < timedelta(0):
        return f"-{write(-value)}"
    left = round(value / _UNITS["ms"])
    parts = []
    for unit in ("d", "h", "m", "s", "ms"):
        size = round(_UNITS[unit] / _UNITS["ms"])
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
