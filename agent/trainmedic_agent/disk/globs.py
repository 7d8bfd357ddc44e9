"""Path patterns relative to a cleaning root, matched component by component.

- ``*``, ``?``, ``[abc]`` and ``[!abc]`` match within a component, also a leading dot. A literal star is ``[*]``.
- ``**`` matches any number of directories, as the last component everything below.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from functools import cached_property

from msgspec import Struct

ANY_DEPTH = "**"
_MAX_LENGTH = 1024  # characters

Matcher = Callable[[str], object]


def _accept_any(_: str) -> object:
    return True


class Glob(Struct, frozen=True, dict=True):
    text: str
    parts: tuple[str, ...]

    @cached_property
    def matchers(self) -> tuple[Matcher, ...]:
        return tuple(_matcher(part) for part in self.parts)

    @classmethod
    def read(cls, text: str) -> Glob:
        """Raises ValueError."""
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
    """Positions that several patterns have reached at one directory of a walk."""

    globs: tuple[Glob, ...]
    positions: frozenset[tuple[int, int]]  # indexes of a pattern and of its next component
    last: tuple[Matcher, ...]
    """Matchers of last components."""

    @classmethod
    def of(cls, globs: Iterable[Glob]) -> GlobState:
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
        return any(match(name) for match in self.last)

    def below(self, name: str) -> GlobState | None:
        """Return a subdirectory's state. None if nothing in it can match."""
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
