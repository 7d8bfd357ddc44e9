"""How much the compiler may compile of one file, so that no file holds up the others for long.

The bounds of a file's bytes, values and depth are those of ``yaml_text``, those of one template of ``template_syntax``.
"""

from __future__ import annotations

MOST_PARTS = 50_000
"""Of the templates in one file: their names, constants, operators and so on. Compiling them takes some 3 s."""
_PARTS_OF_ANY_TEMPLATE = 10
_CHARACTERS_PER_PART = 16


class TooLarge(Exception):
    """The templates of a file have too many parts to be compiled."""


class Allowance:
    """What is left to one file; all its playbooks share it."""

    def __init__(self) -> None:
        self._left = MOST_PARTS

    def spend_on_template(self, nodes: int) -> None:
        """Raises TooLarge."""
        self._spend(nodes + _PARTS_OF_ANY_TEMPLATE)

    def spend_on_manifest(self, characters: int) -> None:
        """Count a manifest, which is checked and compiled for each step that names it. Raises TooLarge."""
        self._spend(characters // _CHARACTERS_PER_PART)

    def _spend(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise TooLarge(f"the templates of this file have over {MOST_PARTS} parts together; divide the file")
