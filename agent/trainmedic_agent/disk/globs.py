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
from functools import cached_property

from msgspec import Struct

ANY_DEPTH = "**"
_MAX_LENGTH = 1024

Matcher = Callable[[str], object]


def _accept_any(_: str) -> object:
    return True


class Glob(Struct, frozen=True, dict=True):
    """One pattern, as this module describes it; `read` checks it."""

    text: str
    parts: tuple[str, ...]

    @cached_property
    def matchers(self) -> tuple[Matcher, ...]:
        """For each part, what says whether a name fits."""
        return tuple(_matcher(part) for part in self.parts)

    @classmethod
    def read(cls, text: str) -> Glob:
        """The pattern that `text` writes. Raises ValueError."""
        if not text or len(text) > _MAX_LENGTH or "\0" in text:
            raise ValueError(f"a pattern has 1 to {_MAX_LENGTH} characters, none of them NUL")
        if text.startswith("/"):
            raise ValueError(f"{text!r} begins with '/'; a pattern is relative to the roots")
        parts = tuple(text.split("/"))
        for part in parts:
            if part in ("", ".", ".."):
                raise ValueError(f"{text!r} has the part {part!r}; its parts are names or patterns, between single '/'")
            if ANY_DEPTH in part and part != ANY_DEPTH:
                raise ValueError(f"{text!r}: '**' stands alone between two '/'; within a name write '*'")
        return cls(text, parts)


def _matcher(part: str) -> Matcher:
    return _accept_any if part in (ANY_DEPTH, "*") else re.compile(fnmatch.translate(part)).match


class GlobState(Struct, frozen=True):
    """What may still match below one directory: the positions that several patterns have reached there.

    A ``**`` may stand for no directory, so the position after it has always been reached too.
    """

    globs: tuple[Glob, ...]
    positions: frozenset[tuple[int, int]]
    """Index of a pattern, and index of its part that is compared with the names in this directory."""
    last: tuple[Matcher, ...]
    """The last parts among these: a name that one of them matches completes a whole path."""

    @classmethod
    def of(cls, globs: Iterable[Glob]) -> GlobState:
        """The state at the root."""
        globs = tuple(globs)
        return cls._at(globs, ((index, 0) for index in range(len(globs))))

    @classmethod
    def _at(cls, globs: tuple[Glob, ...], positions: Iterable[tuple[int, int]]) -> GlobState:
        reached = set()
        for index, position in positions:
            glob = globs[index]
            reached.add((index, position))
            while glob.parts[position] == ANY_DEPTH and position + 1 < len(glob.parts):
                position += 1
                reached.add((index, position))
        last = tuple(
            globs[index].matchers[position]
            for index, position in sorted(reached)
            if position + 1 == len(globs[index].parts)
        )
        return cls(globs, frozenset(reached), (_accept_any,) if _accept_any in last else last)

    def accepts(self, name: str) -> bool:
        """Whether the entry `name` of this directory is matched."""
        return any(match(name) for match in self.last)

    def below(self, name: str) -> GlobState | None:
        """The state in the directory `name` of this one; None where nothing in it can match."""
        onward = set()
        for index, position in self.positions:
            glob = self.globs[index]
            if glob.parts[position] == ANY_DEPTH:
                onward.add((index, position))
            elif position + 1 < len(glob.parts) and glob.matchers[position](name):
                onward.add((index, position + 1))
        if not onward:
            return None
        return self if onward == self.positions else GlobState._at(self.globs, onward)
