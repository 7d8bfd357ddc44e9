"""Assembly of a stream's physical lines into the lines that rules see: decoded, without prefixes, joined to blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_logs.domain.finding import Origin, TimeSource
from trainmedic_logs.lines import blocks, kernel_text, prefixes, raw_text, records, times
from trainmedic_logs.lines.blocks import HEADING, ORIGINAL, TRACEBACK, BlockKind, Continuation
from trainmedic_logs.lines.learned_prefixes import LearnedPrefixes
from trainmedic_logs.lines.line import LONGEST, Line
from trainmedic_logs.lines.prefilter import Prefilter
from trainmedic_logs.lines.prefixes import Prefixed
from trainmedic_logs.lines.step_trends import StepTrends

PATIENCE = timedelta(seconds=5)
"""Time that a block waits for its next line."""
_PATIENCE_AFTER_END = timedelta(milliseconds=300)  # after a traceback's exception
# Blocks held back for one stream; if there are more, the oldest is returned unfinished.
_MOST_OPEN = 256
# A progress bar without line feed before a message.
_BAR_BEFORE = re.compile(
    r"[^|]{0,80}\d%\|[^|]{0,300}\| *[\w.?]{1,16}/[\w.?]{1,16} \[[^\]]{1,100}\] {0,4}(?=[A-Z][A-Za-z]{3})"
)
_RICH_CORNERS = frozenset("╭┌+")
_AHEAD = timedelta(minutes=1)  # a time stated further after the arrival is wrong


class _OpenBlock(Struct):
    kind: BlockKind
    first: Line
    last_arrived: datetime
    texts: list[str]
    places: list[int]  # starts of its physical lines in the stream
    length: int  # bytes, with line feeds
    dropped: int = 0  # lines removed from the middle

    def add(self, text: str, places: list[int], arrived: datetime) -> None:
        """If the block is too long, drop lines after its first quarter."""
        self.last_arrived = arrived
        self.texts.append(text)
        self.places.extend(places)
        self.length += len(text.encode()) + 1
        while self.length > LONGEST and len(self.texts) > 2:
            self.length -= len(self.texts.pop(len(self.texts) // 4 or 1).encode()) + 1
            self.dropped += 1

    @property
    def is_full(self) -> bool:
        return len(self.texts) + self.dropped >= blocks.MOST_LINES

    def patience(self) -> timedelta:
        ended = self.kind is BlockKind.TRACEBACK and blocks.has_ended(self.texts)
        return _PATIENCE_AFTER_END if ended else PATIENCE

    def line(self) -> Line:
        texts = self.texts
        while len(texts) > 1 and not texts[-1].strip():
            texts = texts[:-1]
        texts = blocks.unwrapped(texts) if self.kind is BlockKind.TRACEBACK else texts
        return self.first._replace(text="\n".join(texts), is_cut=self.first.is_cut or self.dropped > 0)


class _DividedLine(Struct):
    text: str
    places: list[int]
    number: int
    last: Prefixed  # its last part
    arrived: datetime


class LineAssembler:
    """Assembler of one stream, in which ranks may alternate."""

    def __init__(self, origin: Origin, booted_at: datetime | None = None) -> None:
        """`booted_at`: boot of the machine whose kernel wrote the stream. Without it, times since boot are ignored."""
        self._origin = origin
        # By the rank and local rank that a line's prefix states.
        self._origins: dict[tuple[int | None, int | None], Origin] = {}
        self._is_kernel = origin.source == "kernel"
        self._booted_at = booted_at
        self._number = 0
        # By the prefix of their lines: lines of several programs may alternate.
        self._open: dict[str, _OpenBlock] = {}
        self._divided: dict[str, _DividedLine] = {}  # parts so far of a line that a container runtime divided
        self._learned = LearnedPrefixes()  # bool() is True while it knows a prefix
        self._trends = StepTrends()

    @property
    def oldest_place(self) -> int | None:
        return min(self.held_places, default=None)

    @property
    def held_places(self) -> list[int]:
        """Starts of held-back lines. A new assembler that reads them again has the same state."""
        of_blocks = [place for block in self._open.values() for place in block.places]
        return of_blocks + [place for part in self._divided.values() for place in part.places]

    def feed_many(
        self, placed: Sequence[tuple[int, bytes]], arrived: datetime, prefilter: Prefilter | None = None
    ) -> list[Line]:
        """With `prefilter`, skip lines that cannot matter."""
        lines: list[Line] = []
        if prefilter is None:
            for place, raw in placed:
                lines += self.feed(raw, arrived, place)
            return lines
        suspects = set(prefilter.suspects([raw for _, raw in placed]))
        if not suspects and not self._holds_back:
            self._number += len(placed)
            return lines
        for number, (place, raw) in enumerate(placed):
            if number in suspects or self._holds_back:
                lines += self.feed(raw, arrived, place)
            else:
                self._number += 1
        return lines

    @property
    def _holds_back(self) -> bool:
        return bool(self._open or self._divided or self._learned)

    def feed(self, raw: bytes, arrived: datetime, place: int) -> list[Line]:
        """Take the next physical line and its start; return completed lines in order."""
        self._number += 1
        text, is_cut = raw_text.text_of(raw)
        if self._is_kernel:
            kernel = kernel_text.split(text, self._booted_at)
            if kernel.is_more:  # a record's properties, without text
                return []
            line = self._line(kernel.text, kernel.at, arrived, place, self._origin, is_cut)
            return self._add_to_block(line, "", arrived, [place])
        prefixed = prefixes.split(text, self._origin.source)
        if prefixed.text.startswith('{"') and (HEADING in text or self._open):
            prefixed = self._of_export(prefixed)
        if prefixed.is_partial or self._divided:
            whole = self._completed(prefixed, arrived, place)
            return [] if whole is None else self._add_divided(whole, is_cut)
        return self._add(prefixed.text, prefixed, self._number, [place], arrived, is_cut)

    def _of_export(self, prefixed: Prefixed) -> Prefixed:
        # Other exported lines keep their level and members, which rules and records read.
        inner = prefixes.exported(prefixed, self._origin.source)
        if inner is None:
            return prefixed
        block = self._open.get(inner.key)
        goes_on = block is not None and blocks.continues(block.kind, block.texts, inner.text) is not Continuation.NO
        begins = inner.text.startswith(TRACEBACK) or (inner.text[:1] in _RICH_CORNERS and HEADING in inner.text)
        return inner if goes_on or begins else prefixed

    def _add_divided(self, whole: _DividedLine, is_cut: bool) -> list[Line]:
        text = whole.text[:LONGEST]
        is_cut = is_cut or len(whole.text) > LONGEST
        return self._add(text, whole.last, whole.number, whole.places, whole.arrived, is_cut)

    def _add(
        self, text: str, prefixed: Prefixed, number: int, places: list[int], arrived: datetime, is_cut: bool
    ) -> list[Line]:
        # The time, rank and key are those of the line's last part.
        origin, at, key = self._origin_of(prefixed), prefixed.at, prefixed.key
        quoted = blocks.OF_RANK.search(text) if "(RANK " in text else None
        text = text[: quoted.end(1)] if quoted else text
        if "%|" in text and (bar := _BAR_BEFORE.match(text)):
            text = text[bar.end() :]
        # Only a traceback's first line teaches a prefix, so other lines skip this while none is known.
        if self._learned or (HEADING in text and not text.startswith(ORIGINAL)):
            at = at or times.stated_by(text, None)
            text, learned = self._learned.split(text)
            key = self._key_of(text, key, learned)
        line = self._line(text, at, arrived, places[0], origin, is_cut, number)
        line = line._replace(group_rank=int(quoted[2])) if quoted else line
        return self._add_to_block(line, key, arrived, places)

    def flush(self, now: datetime | None = None) -> list[Line]:
        """Return blocks that have waited long enough; without `now` all, and drop incomplete divided lines."""
        due = [key for key, block in self._open.items() if now is None or now - block.last_arrived >= block.patience()]
        if now is None:
            self._divided.clear()
        return [self._close(key).line() for key in due]

    def finish(self) -> list[Line]:  # all that is held back, at the end of a file that is read once
        lines: list[Line] = []
        for key in list(self._divided):  # Docker keeps a program's last output so if it has no line feed
            lines += self._add_divided(self._divided.pop(key), is_cut=False)
        return lines + self.flush()

    def _key_of(self, text: str, key: str, learned: str) -> str:
        """Return the block's key: the line's, with the learned prefix's if it has one."""
        if learned:
            whole = f"{key}\0{learned}"
            if whole not in self._open and not text.startswith(TRACEBACK):
                return key  # the prefix's traceback is no longer held back
            return whole
        if text.startswith("  ") and key not in self._open:
            # The traceback is one message, whose prefix only its first line has. So drop that from the key.
            for other, block in self._open.items():
                if other.startswith(f"{key}\0") and len(block.texts) == 1:
                    self._open[key] = self._close(other)
                    break
        return key

    def _close(self, key: str) -> _OpenBlock:
        self._learned.forget(key.partition("\0")[2])
        return self._open.pop(key)

    def _line(
        self,
        text: str,
        at: datetime | None,
        arrived: datetime,
        place: int,
        origin: Origin,
        is_cut: bool,
        number: int | None = None,
    ) -> Line:
        report = None if self._is_kernel else records.report_of(text)
        record = report.record if report is not None else None
        if record is not None and record["event"] == "step":
            record = {**record, **self._trends.add(origin.rank, record, text)}
        at = at or times.stated_by(text, record if text.startswith("{") else None)
        if at is None or at > arrived + _AHEAD:
            at, source = arrived, TimeSource.ARRIVAL
        else:
            source = TimeSource.LINE
        number = self._number if number is None else number
        has_words = report is not None and report.has_words
        return Line(origin, at, text, source, place, number, record, is_cut, has_words)

    def _add_to_block(self, line: Line, key: str, arrived: datetime, places: list[int]) -> list[Line]:
        """Hold the line back in a block, or return it."""
        done: list[Line] = []
        block = self._open.get(key) if self._open else None
        if block is not None:
            continuation = blocks.continues(block.kind, block.texts, line.text)
            if continuation is not Continuation.NO:
                block.add(line.text, places, arrived)
                if continuation is Continuation.LAST or block.is_full:
                    done.append(self._close(key).line())
                return done
        kind = None if line.record is not None else blocks.kind_of(line.text)
        if block is not None:
            # The next block has the same prefix.
            done.append((self._close(key) if kind is None else self._open.pop(key)).line())
        if kind is None:
            done.append(line)
            return done
        self._open[key] = _OpenBlock(kind, line, arrived, [line.text], places, len(line.text.encode()))
        if len(self._open) > _MOST_OPEN:
            done.append(self._close(next(iter(self._open))).line())
        return done

    def _completed(self, prefixed: Prefixed, arrived: datetime, place: int) -> _DividedLine | None:
        """Return the line after its last part, None before."""
        part = self._divided.pop(prefixed.key, None) or _DividedLine("", [], self._number, prefixed, arrived)
        part.last, part.arrived = prefixed, arrived
        part.places.append(place)
        if len(part.text) <= LONGEST:
            part.text += prefixed.text
        if not prefixed.is_partial:
            return part
        if len(self._divided) < _MOST_OPEN:  # else the part is lost
            self._divided[prefixed.key] = part
        return None

    def _origin_of(self, prefixed: Prefixed) -> Origin:
        if prefixed.rank is None and prefixed.local_rank is None:
            return self._origin
        ranks = (prefixed.rank, prefixed.local_rank)
        origin = self._origins.get(ranks)
        if origin is None:
            own = self._origin
            origin = replace(
                own,
                rank=prefixed.rank if own.rank is None else own.rank,
                local_rank=prefixed.local_rank if own.local_rank is None else own.local_rank,
            )
            if len(self._origins) < _MOST_OPEN * 16:  # a cache
                self._origins[ranks] = origin
        return origin
