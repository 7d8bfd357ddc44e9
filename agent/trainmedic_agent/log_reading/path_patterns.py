"""Patterns for log paths with placeholders for a file's origin: ``/data/logs/{job}/rank-{rank}.log``.

Within a component, ``*``, ``?``, ``[abc]`` and ``[!abc]`` work as in a shell. Each placeholder occurs at most once:

- ``{job}``: the job's name, greedy
- ``{attempt}``, ``{rank}``, ``{local_rank}``, ``{node_rank}``: a number
- ``{node}``: this node's name; files of other nodes are skipped
"""

from __future__ import annotations

import fnmatch
import posixpath
import re

from msgspec import Struct

NUMBERS = ("attempt", "rank", "local_rank", "node_rank")
PLACES = ("job", "node", *NUMBERS)
_PLACE = re.compile(r"\{([a-z_]*)\}")
_NEEDS_LISTING = re.compile(r"[*?\[{]")
_ENDS = re.compile(r"\\[Zz]\Z")  # end of a regular expression from `fnmatch.translate`
_LONGEST = 1024  # characters
_NOT_FOR_LOGS = ("/dev", "/proc", "/sys")


def checked_path(path: str) -> str:
    """Return the path if it can be a log's. Raises ValueError."""
    if not path.startswith("/") or path.startswith("//") or posixpath.normpath(path) != path or "\0" in path:
        raise ValueError(f"{path!r} must be an absolute path without '.', '..', double or closing '/'")
    if path == "/" or len(path) > _LONGEST:
        raise ValueError(f"{path!r} must name a directory or file below /, in at most {_LONGEST} characters")
    if any(path == place or path.startswith(f"{place}/") for place in _NOT_FOR_LOGS):
        raise ValueError(f"{path} cannot be read as a log: it belongs to the kernel")
    return path


class PathPattern(Struct, frozen=True):
    text: str
    base: str
    """Directory before the first pattern."""
    parts: tuple[re.Pattern[str], ...]
    """For the names below `base`, the last for the file name."""

    @classmethod
    def read(cls, text: str) -> PathPattern:
        """Raises ValueError."""
        checked_path(text)
        places = _PLACE.findall(text)
        for place in places:
            if place not in PLACES:
                raise ValueError(f"{text!r}: {{{place}}} is not a placeholder; use {', '.join(PLACES)}")
            if places.count(place) > 1:
                raise ValueError(f"{text!r} has {{{place}}} twice")
        names = text.split("/")[1:]
        fixed = next((n for n, name in enumerate(names) if _NEEDS_LISTING.search(name)), len(names) - 1)
        if fixed == 0:
            raise ValueError(f"{text!r} must begin with a directory's name, without a pattern")
        if "**" in names:
            raise ValueError(f"{text!r}: '**' has no meaning here; write a pattern for each depth")
        return cls(text, "/" + "/".join(names[:fixed]), tuple(re.compile(_regex(name)) for name in names[fixed:]))


def _regex(name: str) -> str:
    pieces = _PLACE.split(name)
    written = [_ENDS.sub("", fnmatch.translate(piece)) for piece in pieces[::2]]
    for index, place in enumerate(pieces[1::2]):
        written[index] += rf"(?P<{place}>\d{{1,9}})" if place in NUMBERS else rf"(?P<{place}>.+)"
    return "".join(written) + r"\Z"
