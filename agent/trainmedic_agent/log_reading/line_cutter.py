"""Cuts what is read of a file into lines, in bounded memory, whatever is in the file. Pure.

A line ends with a line feed. Of a line that is longer than rules look at, the beginning is given out as soon as it is
there, and the rest up to the next line feed is left out, so a file without any line feed costs no memory.
"""

from __future__ import annotations

from trainmedic_logs.lines.line import LONGEST

MOST_KEPT = LONGEST + 1
"""Bytes of a line that are given out: one more than rules look at, so that they know that it was cut."""

PlacedLine = tuple[int, bytes]
"""Where a line begins, in bytes from the beginning of its file, and the line without its line feed."""


class LineCutter:
    """Takes pieces of a file, from `offset` on, and gives out their lines, of each at most `longest` bytes.

    `is_skipping`: what comes next is the rest of a line whose beginning was given out.
    """

    def __init__(self, offset: int = 0, is_skipping: bool = False, longest: int = MOST_KEPT) -> None:
        self.offset = offset
        """How much of the file was taken."""
        self.is_skipping = is_skipping
        self.left_out = 0
        """Bytes of long lines that were not given out."""
        self._begun = b""
        self._longest = longest

    @property
    def resume_at(self) -> int:
        """From where on a new cutter, with this one's `is_skipping`, gives out the same lines from now on."""
        return self.offset - len(self._begun)

    @property
    def has_half_line(self) -> bool:
        """Whether it keeps a line whose end has not come."""
        return bool(self._begun)

    def feed(self, piece: bytes) -> list[PlacedLine]:
        """Take the next bytes; return the lines that end with them, and the beginning of one that is too long."""
        lines: list[PlacedLine] = []
        begin = 0
        while (end := piece.find(b"\n", begin)) >= 0:
            if self.is_skipping:
                self.left_out += end - begin
            else:
                self._give_out(self._begun + piece[begin:end], lines)
            self.offset += end + 1 - begin
            self.is_skipping = False
            begin = end + 1
        self._keep(piece[begin:], lines)
        return lines

    def half_line(self) -> list[PlacedLine]:
        """Give out a line whose end does not come; what follows counts as a line of its own."""
        lines: list[PlacedLine] = []
        if self._begun:
            self._give_out(self._begun, lines)
        return lines

    def _keep(self, rest: bytes, lines: list[PlacedLine]) -> None:
        """Keep the beginning of a line whose end is still to come."""
        if self.is_skipping:
            self.left_out += len(rest)
            self.offset += len(rest)
            return
        begun = self._begun + rest
        if len(begun) >= self._longest:
            self._give_out(begun, lines)
            self.is_skipping = True
        else:
            self._begun = begun
        self.offset += len(rest)

    def _give_out(self, line: bytes, lines: list[PlacedLine]) -> None:
        """`offset` is still where the new part of the line begins, after `_begun`."""
        lines.append((self.resume_at, line[: self._longest]))
        self.left_out += max(len(line) - self._longest, 0)
        self._begun = b""
