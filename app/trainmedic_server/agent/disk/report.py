"""What a cleaning did and what it left, counted while it goes on and told as the command's output.

Paths in it are examples, three for each reason and rule, and written so that any name can be read: bytes
that are not UTF-8 and control characters as escapes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmedic_server.agent.disk.reasons import Reason
from trainmedic_server.agent.disk.walk import Directory

_EXAMPLES = 3
_LONGEST_PATH = 200


@dataclass(slots=True)
class _Left:
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """One rule's part of the output.

    ``matched`` counts what the rule was ready to delete when it had looked at everything; ``files`` and
    ``bytes`` what was deleted or truncated, a checkpoint's files each; ``checkpoints`` those deleted whole.
    """

    matched: int = 0
    files: int = 0
    bytes: int = 0
    checkpoints: int | None = None
    refused: dict[str, str] = field(default_factory=dict)
    enough: list[str] = field(default_factory=list)
    """Roots that were left alone, since enough is free there."""
    listening: bool = True
    """Whether `left` counts: a second look at the same files does not."""
    _left: dict[Reason, _Left] = field(default_factory=dict)

    def looked_over(self, reason: Reason, directory: Directory, name: str) -> None:
        """The rule leaves it as it is; told while the tree is looked through."""
        if self.listening:
            self.left(reason, directory, name)

    def left(self, reason: Reason, directory: Directory, name: str) -> None:
        """It was, or would have been, its turn, and it was left."""
        entry = self._left.setdefault(reason, _Left())
        entry.count += 1
        if len(entry.examples) < _EXAMPLES:
            entry.examples.append(shown(directory.path(name)))

    def left_over(self, reason: Reason, count: int) -> None:
        """So many were left when the rule ended."""
        if count > 0:
            self._left.setdefault(reason, _Left()).count += count

    def output(self) -> Mapping[str, Any]:
        left = {
            str(reason): {"count": entry.count, **({"examples": entry.examples} if entry.examples else {})}
            for reason, entry in sorted(self._left.items())
        }
        return {
            "matched": self.matched,
            "files": self.files,
            "bytes": self.bytes,
            **({} if self.checkpoints is None else {"checkpoints": self.checkpoints}),
            "left": left,
            **({"refused_roots": self.refused} if self.refused else {}),
            **({"free_enough_roots": self.enough} if self.enough else {}),
        }


def shown(path: str) -> str:
    """A path for a person: on one line, and not longer than a line."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return text if len(text) <= _LONGEST_PATH else f"{text[: _LONGEST_PATH - 1]}…"
