"""Which of many physical lines can mean anything, found in one pass over all of them before any is decoded.

Most lines of a training hold no literal of a rule, begin no block and report no step. To cut, decode and strip each of
them in order to see that costs fifty times as much as to look for what a line that counts must hold. Whoever uses this
finds what they would have found without it: a line is passed over only where nothing that is done to it could change
that.

Not here: lines that go on with what an earlier one began (``assembly``, which knows what it holds back).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from trainmedic_core.expressions.regexes import ByteSearch, literal_bytes
from trainmedic_logs.lines.blocks import BEGINNINGS
from trainmedic_logs.lines.prefixes import DIVIDED
from trainmedic_logs.lines.raw_text import has_controls, shown_of
from trainmedic_logs.lines.records import REPORTS

_REPLACED = "\N{REPLACEMENT CHARACTER}"
"""What stands in a text for bytes that are not UTF-8, whichever they were."""


class LineSearch:
    """Finds the lines in which one of some patterns stands, as a person would see them; for any number of streams."""

    def __init__(self, patterns: Sequence[bytes]) -> None:
        """`patterns` are those of a `ByteSearch`."""
        self._search = ByteSearch(patterns)

    def suspects(self, lines: Sequence[bytes]) -> list[int]:
        """The positions of those lines, in their order; none of `lines` holds a line feed."""
        together = b"\n".join(lines)
        if has_controls(together):
            # Colours and carriage returns can stand within a literal, and a redrawn bar between two.
            lines = [shown_of(line) for line in lines]
            together = b"\n".join(lines)
        at = self._search.next(together, 0)
        if at is None:
            return []
        suspects: list[int] = []
        beyond = list(accumulate(len(line) + 1 for line in lines))
        while at is not None:
            suspects.append(bisect_right(beyond, at))
            at = self._search.next(together, beyond[suspects[-1]]) if suspects[-1] + 1 < len(lines) else None
        return suspects


class Prefilter(LineSearch):
    """Made for the literals of some rules: finds the lines that may mean something."""

    def __init__(self, literals: Iterable[str]) -> None:
        parts = {max(literal.split(_REPLACED), key=len) for literal in literals}
        # A literal that holds another one is in no line that the other is not in.
        fewest = [each for each in parts if not any(other in each for other in parts - {each})]
        super().__init__([*BEGINNINGS, *REPORTS, DIVIDED, *(literal_bytes(each) for each in sorted(fewest))])
