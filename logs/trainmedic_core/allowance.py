"""Limit of the templates in one file."""

from __future__ import annotations

MOST_PARTS = 50_000
"""Syntax-tree nodes, compiled in about 3 s."""
_PARTS_OF_ANY_TEMPLATE = 10  # fixed cost of compiling one
_CHARACTERS_PER_PART = 16  # of a manifest


class TooLarge(Exception):
    """A file's templates have too many parts."""


class Allowance:
    def __init__(self) -> None:
        self._left = MOST_PARTS

    def spend_on_template(self, nodes: int) -> None:
        """Raises TooLarge."""
        self._spend(nodes + _PARTS_OF_ANY_TEMPLATE)

    def spend_on_manifest(self, characters: int) -> None:
        """Count a manifest for each step that names it. Raises TooLarge."""
        self._spend(characters // _CHARACTERS_PER_PART)

    def _spend(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise TooLarge(f"the templates of this file have over {MOST_PARTS} parts together; divide the file")
