"""Splitting of a file into lines in bounded memory."""

from __future__ import annotations

from trainmedic_logs.lines.line import LONGEST

MOST_KEPT = LONGEST + 1  # bytes of a line: one more than rules process, so that they notice the cut

PlacedLine = tuple[int, bytes]  # offset, and line without line feed


class LineCutter:
    """Splitter of pieces from `offset` on into lines of at most `longest` bytes.

    `is_skipping`: bytes up to the next line feed are dropped; the line was returned cut, or its beginning is missing.
    """

    def __init__(self, offset: int = 0, is_skipping: bool = False, longest: int = MOST_KEPT) -> None:
        self.offset = offset  # end of the pieces so far
        self.is_skipping = is_skipping
        self.left_out = 0  # dropped bytes
        self._begun = b""
        self._longest = longest

    @property
    def resume_at(self) -> int:
        """Offset at which a new cutter continues."""
        return self.offset - len(self._begun)

    @property
    def has_unfinished_line(self) -> bool:
        return bool(self._begun)

    def feed(self, piece: bytes) -> list[PlacedLine]:
        """Return the lines that end in this piece, and an overlong one's beginning."""
        lines: list[PlacedLine] = []
        begin = 0
        while (end := piece.find(b"\n", begin)) >= 0:
            if self.is_skipping:
                self.left_out += end - begin
            else:
                self._add_line(self._begun + piece[begin:end], lines)
            self.offset += end + 1 - begin
            self.is_skipping = False
            begin = end + 1
        self._keep(piece[begin:], lines)
        return lines

    def take_unfinished_line(self) -> list[PlacedLine]:
        lines: list[PlacedLine] = []
        if self._begun:
            self._add_line(self._begun, lines)
        return lines

    def _keep(self, rest: bytes, lines: list[PlacedLine]) -> None:
        if self.is_skipping:
            self.left_out += len(rest)
            self.offset += len(rest)
            return
        begun = self._begun + rest
        if len(begun) >= self._longest:
            self._add_line(begun, lines)
            self.is_skipping = True
        else:
            self._begun = begun
        self.offset += len(rest)

    def _add_line(self, line: bytes, lines: list[PlacedLine]) -> None:
        lines.append((self.resume_at, line[: self._longest]))
        self.left_out += max(len(line) - self._longest, 0)
        self._begun = b""
