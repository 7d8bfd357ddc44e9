"""Regular expressions as Alertmanager has them, by the library that Go's are modelled on: RE2.

RE2 never backtracks: what a match takes is at most the length of the text times the size of the
pattern. Both are bounded here, so that no pattern and no label can hold up the server.
"""

from __future__ import annotations

import re2

LARGEST_PROGRAM = 10_000
"""Instructions that a pattern may compile to. ``.{1000}`` has 9,000; a list of names has some hundreds."""
MOST_WORK = 50_000_000
"""Instructions times bytes of a match: at worst some 50 ms. A pattern of 500 instructions takes any label that is
let in, one of 10,000 takes labels of 5 kB."""
_LONGEST_PATTERN = 1000
_MEMORY = 1 << 20  # bytes for one pattern's program and automaton


class ValueTooLong(Exception):
    """A value is too long to try this regular expression on."""


class Pattern:
    """One compiled pattern, which matches whole values."""

    def __init__(self, pattern: str) -> None:
        """Raises ValueError that says what is wrong."""
        if len(pattern) > _LONGEST_PATTERN:
            raise ValueError(f"a regular expression has at most {_LONGEST_PATTERN} characters")
        try:
            self._compiled = re2.compile(_bytes(pattern), options=_options())
        except re2.error as error:
            raise ValueError(f"not a regular expression: {_reason(error)}") from None
        if self._compiled.programsize > LARGEST_PROGRAM:
            raise ValueError("the regular expression is too large when its repetitions are written out")

    def matches(self, value: str) -> bool:
        """Return whether the pattern matches the whole value. Raises ValueTooLong."""
        text = _bytes(value)
        if len(text) * self._compiled.programsize > MOST_WORK:
            raise ValueTooLong(f"it has {len(value)} characters, too many for this regular expression")
        return self._compiled.fullmatch(text) is not None


def _options() -> re2.Options:
    options = re2.Options()
    options.max_mem = _MEMORY
    options.never_capture = True
    options.log_errors = False  # they are raised, and told with their place
    return options


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can write: Go reads it as U+FFFD, and so Alertmanager.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else error
    return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
