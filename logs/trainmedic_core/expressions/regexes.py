"""Regular expressions of RE2, which never backtracks, with limited pattern and text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import re2
from msgspec import Struct

LARGEST_PROGRAM = 10_000
"""Instructions of a pattern: ``.{1000}`` has 9,000."""
MOST_WORK = 50_000_000
"""Instructions times bytes of a match, about 50 ms."""
_LONGEST_PATTERN = 1000  # characters
LARGEST_SEARCH = 2_000
"""Instructions; about 20 ms for a hostile line of 8 KiB."""
_MEMORY = 1 << 20  # bytes for one pattern's program and automaton
_SET_MEMORY = 32 << 20  # bytes for about 1,000 literals, allocated on demand


class ValueTooLong(Exception):
    """The value is too long for this pattern."""


class Found(Struct, frozen=True):
    """Byte offset of a match, and its non-empty named groups."""

    start: int
    groups: Mapping[str, str]


class Pattern:
    """Pattern for whole values."""

    def __init__(self, pattern: str) -> None:
        """Raises ValueError with the reason."""
        self._compiled = _compiled(pattern, LARGEST_PROGRAM, never_capture=True)

    def matches(self, value: str) -> bool:
        """Raises ValueTooLong."""
        text = _bytes(value)
        if len(text) * self._compiled.programsize > MOST_WORK:
            raise ValueTooLong(f"it has {len(value)} characters, too many for this regular expression")
        return self._compiled.fullmatch(text) is not None


class SearchPattern:
    def __init__(self, pattern: str) -> None:
        """Raises ValueError with the reason."""
        self._compiled = _compiled(pattern, LARGEST_SEARCH, never_capture=False)
        self._numbers = [(_text(name), number) for name, number in self._compiled.groupindex.items()]
        self.groups = tuple(name for name, _ in self._numbers)

    def search(self, line: bytes) -> Found | None:
        """Return the first match in UTF-8 bytes."""
        match = self._compiled.search(line)
        if match is None:
            return None
        return Found(match.start(), {name: _text(took) for name, at in self._numbers if (took := match.group(at))})

    def spans(self, line: bytes, most: int) -> list[tuple[int, int]]:
        """Return start and end in bytes of the first `most` non-empty matches."""
        places = ((match.start(), match.end()) for match in self._compiled.finditer(line))
        return list(itertools.islice(((start, end) for start, end in places if end > start), most))


class LiteralSet:
    """Search for many literals at once."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._set = re2.Set.SearchSet(_options(_SET_MEMORY))
        self._is_empty = not literals
        for literal in literals:
            self._set.Add(re2.escape(literal.encode()))
        if literals:
            self._set.Compile()

    def present(self, line: bytes) -> list[int]:
        """Return the indexes of the literals in the line."""
        return [] if self._is_empty else self._set.Match(line)


class ByteSearch:
    def __init__(self, patterns: Sequence[bytes]) -> None:
        """Quote external text with `literal_bytes` first."""
        options = _options(_SET_MEMORY)
        options.encoding = re2.Options.Encoding.LATIN1
        options.never_capture = True
        self._compiled = re2.compile(b"|".join(patterns), options=options)

    def next(self, text: bytes, start: int) -> int | None:
        """Return the next match's offset from `start` on, or None."""
        found = self._compiled.search(text, start)
        return None if found is None else int(found.start())


def literal_bytes(literal: str) -> bytes:
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
    options.log_errors = False  # they are raised instead
    return options


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Half a surrogate pair (possible in JSON) becomes U+FFFD, as in Go and Alertmanager.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


_NOT_IN_RE2 = tuple(f"invalid perl operator: (?{mark}" for mark in "=!<") + tuple(
    f"invalid escape sequence: \\{digit}" for digit in range(1, 10)
)


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else error
    said = _text(reason) if isinstance(reason, bytes) else str(reason)
    return f"{said}; RE2 has neither look-around nor references to groups" if said.startswith(_NOT_IN_RE2) else said
