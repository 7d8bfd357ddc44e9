"""Patterns for paths below a cleaning root, matched one component at a time while a tree is walked.

A pattern is relative to its root, its parts are separated by ``/``:

- ``*`` stands for any characters within one part, none included, a leading dot included; ``?`` for one,
  ``[abc]`` and ``[!abc]`` for one of, or none of, those. Upper and lower case differ. There is no escape
  and there are no braces: a star itself is written ``[*]``.
- ``**`` as a whole part stands for any number of directories, none included; as the last part for
  everything below, at any depth.

A name that is not UTF-8 is matched byte by byte (``surrogateescape``), a line break like any character.
Not here: walking (``walk``), or which files count (``rules``).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

ANY_DEPTH = "**"
_LONGEST = 1024

Matcher = Callable[[str], object]


def _any(_: str) -> object:
    return True


@dataclass(frozen=True, slots=True)
class Glob:
    """One pattern; see this module. `read` checks it."""

    text: str
    parts: tuple[str, ...]
    matchers: tuple[Matcher, ...] = field(compare=False, repr=False)

    @classmethod
    def read(cls, text: str) -> Glob:
        """The pattern that `text` writes. Raises ValueError."""
        if not text or len(text) > _LONGEST or "\0" in text:
            raise ValueError(f"a pattern has 1 to {_LONGEST} characters, none of them NUL")
        if text.startswith("/"):
            raise ValueError(f"{text!r} begins with '/'; a pattern is relative to the roots")
        parts = tuple(text.split("/"))
        for part in parts:
            if part in ("", ".", ".."):
                raise ValueError(f"{text!r} has the part {part!r}; its parts are names or patterns, between single '/'")
            if ANY_DEPTH in part and part != ANY_DEPTH:
                raise ValueError(f"{text!r}: '**' stands alone between two '/'; within a name write '*'")
        return cls(text, parts, tuple(_matcher(part) for part in parts))


def _matcher(part: str) -> Matcher:
    return _any if part in (ANY_DEPTH, "*") else re.compile(fnmatch.translate(part)).match


@dataclass(frozen=True, slots=True)
class State:
    """What may still match below one directory: positions in several patterns, ``**`` already skipped."""

    globs: tuple[Glob, ...]
    positions: frozenset[tuple[int, int]]
    last: tuple[Matcher, ...]
    """Whether a name in this directory is matched as a whole path; one of these says so."""

    @classmethod
    def of(cls, globs: Iterable[Glob]) -> State:
        """At the root."""
        globs = tuple(globs)
        return cls._at(globs, ((which, 0) for which in range(len(globs))))

    @classmethod
    def _at(cls, globs: tuple[Glob, ...], positions: Iterable[tuple[int, int]]) -> State:
        closed = set()
        for which, at in positions:
            parts = globs[which].parts
            closed.add((which, at))
            while parts[at] == ANY_DEPTH and at + 1 < len(parts):
                at += 1
                closed.add((which, at))
        ends = tuple(globs[which].matchers[at] for which, at in sorted(closed) if at + 1 == len(globs[which].parts))
        return cls(globs, frozenset(closed), (_any,) if _any in ends else ends)

    def accepts(self, name: str) -> bool:
        """Whether the entry `name` of this directory is matched."""
        return any(match(name) for match in self.last)

    def below(self, name: str) -> State | None:
        """The state in the directory `name` of this one; None where nothing in it can match."""
        onward = set()
        for which, at in self.positions:
            glob = self.globs[which]
            if glob.parts[at] == ANY_DEPTH:
                onward.add((which, at))
            elif at + 1 < len(glob.parts) and glob.matchers[at](name):
                onward.add((which, at + 1))
        if not onward:
            return None
        return self if onward == self.positions else State._at(self.globs, onward)
