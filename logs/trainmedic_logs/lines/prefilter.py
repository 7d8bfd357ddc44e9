"""Selection of lines that may matter: fifty times cheaper than decoding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from trainmedic_core.expressions.regexes import ByteSearch, literal_bytes
from trainmedic_logs.lines.blocks import BEGINNINGS
from trainmedic_logs.lines.prefixes import DIVIDED
from trainmedic_logs.lines.raw_text import has_controls, shown_of
from trainmedic_logs.lines.records import REPORTS

# In a literal it stands for any bytes that are not UTF-8.
_REPLACED = "\N{REPLACEMENT CHARACTER}"


class LineSearch:
    """Search for any of several byte patterns."""

    def __init__(self, patterns: Sequence[bytes]) -> None:
        self._search = ByteSearch(patterns)

    def suspects(self, lines: Sequence[bytes]) -> list[int]:
        """Return matching lines' indexes. Lines contain no line feed."""
        together = b"\n".join(lines)
        if has_controls(together):
            # Colours and carriage returns can split a literal.
            lines = [shown_of(line) for line in lines]
            together = b"\n".join(lines)
        at = self._search.next(together, 0)
        if at is None:
            return []
        suspects: list[int] = []
        next_begins = list(accumulate(len(line) + 1 for line in lines))
        while at is not None:
            number = bisect_right(next_begins, at)
            suspects.append(number)
            is_last = number + 1 >= len(lines)
            at = None if is_last else self._search.next(together, next_begins[number])
        return suspects


class Prefilter(LineSearch):
    """Search for rules' literals, and for tracebacks, records and divided lines."""

    def __init__(self, literals: Iterable[str]) -> None:
        parts = {max(literal.split(_REPLACED), key=len) for literal in literals}
        # A literal that contains another one is redundant.
        fewest = [each for each in parts if not any(other in each for other in parts - {each})]
        super().__init__([*BEGINNINGS, *REPORTS, DIVIDED, *(literal_bytes(each) for each in sorted(fewest))])
