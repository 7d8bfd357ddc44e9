"""Regular expressions as Alertmanager and Go have them, by the library RE2: `Pattern` for a label's whole value,
`SearchPattern` for what stands somewhere in a line, `LiteralSet` and `ByteSearch` for many at once.

RE2 never backtracks: what a match takes is at most the length of the text times the size of the
pattern. Both are bounded here, so that no pattern and no label can hold up the server.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import re2
from msgspec import Struct

LARGEST_PROGRAM = 10_000
"""Instructions that a pattern may compile to. ``.{1000}`` has 9,000; a list of names has some hundreds."""
MOST_WORK = 50_000_000
"""Instructions times bytes of a match: at worst some 50 ms. A pattern of 500 instructions takes any label that is
let in, one of 10,000 takes labels of 5 kB."""
_LONGEST_PATTERN = 1000
LARGEST_SEARCH = 2_000
"""Instructions of a `SearchPattern`: on a hostile line of 8 KiB at worst some 20 ms, in practice a hundredth of it."""
_MEMORY = 1 << 20  # bytes for one pattern's program and automaton
_SET_MEMORY = 32 << 20  # for a thousand literals; it is used as the lines need it


class ValueTooLong(Exception):
    """A value is too long to try this regular expression on."""


class Found(Struct, frozen=True):
    """Where a pattern was found: the byte at which it begins, and its named groups that took anything."""

    start: int
    groups: Mapping[str, str]


class Pattern:
    """One compiled pattern, which matches whole values."""

    def __init__(self, pattern: str) -> None:
        """Raises ValueError that says what is wrong."""
        self._compiled = _compiled(pattern, LARGEST_PROGRAM, never_capture=True)

    def matches(self, value: str) -> bool:
        """Return whether the pattern matches the whole value. Raises ValueTooLong."""
        text = _bytes(value)
        if len(text) * self._compiled.programsize > MOST_WORK:
            raise ValueTooLong(f"it has {len(value)} characters, too many for this regular expression")
        return self._compiled.fullmatch(text) is not None


class SearchPattern:
    """One compiled pattern, which is looked for in a line: `start` and named groups of its first place."""

    def __init__(self, pattern: str) -> None:
        """Raises ValueError that says what is wrong."""
        self._compiled = _compiled(pattern, LARGEST_SEARCH, never_capture=False)
        self._numbers = [(_text(name), number) for name, number in self._compiled.groupindex.items()]
        self.groups = tuple(name for name, _ in self._numbers)

    def search(self, line: bytes) -> Found | None:
        """Look for it in UTF-8 bytes, of which each costs at most some `LARGEST_SEARCH` instructions."""
        match = self._compiled.search(line)
        if match is None:
            return None
        return Found(match.start(), {name: _text(took) for name, at in self._numbers if (took := match.group(at))})

    def spans(self, line: bytes, most: int) -> list[tuple[int, int]]:
        """Return the first `most` non-empty matches as byte offsets of start and end."""
        places = ((match.start(), match.end()) for match in self._compiled.finditer(line))
        return list(itertools.islice(((start, end) for start, end in places if end > start), most))


class LiteralSet:
    """Which of some texts are in a line, found in one pass over it."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._set = re2.Set.SearchSet(_options(_SET_MEMORY))
        self._is_empty = not literals
        for literal in literals:
            self._set.Add(re2.escape(literal.encode()))
        if literals:
            self._set.Compile()

    def present(self, line: bytes) -> list[int]:
        """Return the positions, among the literals, of those that are in the line."""
        return [] if self._is_empty else self._set.Match(line)


class ByteSearch:
    """The first place of any of some patterns in much text."""

    def __init__(self, patterns: Sequence[bytes]) -> None:
        """Each pattern is one over bytes, for which no text comes from outside but by `literal_bytes`."""
        options = _options(_SET_MEMORY)
        options.encoding = re2.Options.Encoding.LATIN1
        options.never_capture = True
        self._compiled = re2.compile(b"|".join(patterns), options=options)

    def next(self, text: bytes, start: int) -> int | None:
        """Return where the next one begins from `start` on; None where there is none."""
        found = self._compiled.search(text, start)
        return None if found is None else int(found.start())


def literal_bytes(literal: str) -> bytes:
    """The pattern for `ByteSearch` that is a text's UTF-8."""
    return bytes(re2.escape(literal.encode()))


def _compiled(pattern: str, largest: int, *, never_capture: bool) -> Any:
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"a regular expression has at most {_LONGEST_PATTERN} characters")
    options = _options()
    options.never_capture = never_capture
    try:
        compiled = re2.compile(_bytes(pattern), options=options)
    except re2.error as error:
        raise ValueError(f"not a regular expression: {_reason(error)}") from None
    if compiled.programsize > largest:
        raise ValueError("the regular expression is too large when its repetitions are written out")
    return compiled


def _options(memory: int = _MEMORY) -> re2.Options:
    options = re2.Options()
    options.max_mem = memory
    options.log_errors = False  # they are raised, and told with their place
    return options


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can write: Go reads it as U+FFFD, and so Alertmanager.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


_NOT_IN_RE2 = tuple(f"invalid perl operator: (?{mark}" for mark in "=!<") + tuple(
    f"invalid escape sequence: \\{digit}" for digit in range(1, 10)
)
"""How RE2 names what it does not have."""


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else error
    said = _text(reason) if isinstance(reason, bytes) else str(reason)
    return f"{said}; RE2 has neither look-around nor references to groups" if said.startswith(_NOT_IN_RE2) else said
