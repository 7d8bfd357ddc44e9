"""An open log file whose lines go to the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_reading.job_budgets import LineBudget, LinesOfJobs
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.log_reading.log_files import FilePosition, GrowingFile
from trainmedic_agent.log_reading.rule_runner import RuleRunner
from trainmedic_agent.log_reading.streams import BYTES_AROUND, LineStream, excerpt_of
from trainmedic_logs.domain.finding import Excerpt, Origin
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES

HALF_LINE_SECONDS = 10.0  # seconds without new data after which an unfinished line counts as complete


class KnownFile(Struct, frozen=True):
    position: FilePosition
    origin: Origin
    stream: Mapping[str, Any]  # state of processing: `LineStream.to_json`, or `ShippedFile.state`

    @property
    def key(self) -> str:
        """Key of the stored position."""
        return f"{self.position.generation} {self.origin.stream}"


class FollowedFile:
    """Not thread-safe."""

    def __init__(
        self,
        file: GrowingFile,
        known: KnownFile,
        budget: LineBudget,
        runner: RuleRunner,
        counters: LogCounters,
        monotonic: float,
        arrivals: ArrivalIndex | None = None,
        of_jobs: LinesOfJobs | None = None,
    ) -> None:
        self._of_jobs = of_jobs
        self._runner = runner
        self._arrivals = arrivals
        self._counters = counters
        self.file = file
        self.origin = known.origin
        self.grown_at = monotonic
        self._budget = budget
        self._left_out = 0
        self._has_caught_up = False  # True once all that existed at the start was read
        self._position = known.position
        self.stream = self._new_stream(known.stream)

    @property
    def key(self) -> str:
        return self.known().key

    @property
    def _file_key(self) -> tuple[int, int]:
        return self._position.device, self._position.inode

    def place_json(self) -> Mapping[str, Any]:
        self._position = self.file.position(self.stream.oldest_place)
        return {"file": self._position.to_json(), "origin": asdict(self.origin)}

    def known(self) -> KnownFile:
        return KnownFile(self._position, self.origin, self.stream.to_json())

    def excerpt(self, place: int) -> Excerpt | None:
        try:
            before, after = self.file.around(place, BYTES_AROUND)
        except OSError:
            return None
        earlier = before.split(b"\n")[:-1]
        if len(before) == BYTES_AROUND:
            earlier = earlier[1:]  # the first line's beginning is missing
        following = after.removesuffix(b"\n").split(b"\n")
        return excerpt_of(earlier, following)

    def begin(self) -> None:
        self._runner.begin(self)

    def poll(self, now: datetime, monotonic: float) -> bool:
        counters = self._counters
        if not self.file.look():
            self._restart(now)
            self.file.look()
        if self._arrivals is not None:
            self._arrivals.record_look(self._file_key, self.file.size, self.file.written_ns, now)
        offset = self.file.offset
        placed = self.file.read()
        if self.file.offset != offset:
            self.grown_at = monotonic
        quiet = monotonic - self.grown_at
        if not placed and quiet >= HALF_LINE_SECONDS and self.file.has_unfinished_line:
            placed = self.file.take_unfinished_line()
        counters.bytes_left_out += self.file.left_out - self._left_out
        self._left_out = self.file.left_out
        counters.lines.add(self.origin.source, len(placed))
        self.stream.owner = self.file.owner
        kept = self._budget.within(placed, monotonic)
        if self._of_jobs is not None:
            kept = self._of_jobs.within(self.file.owner, kept)
        counters.lines_left_out.add(self.origin.source, len(placed) - len(kept))
        prefilter = self._runner.prefilter(self.origin.source)
        lines = [*self.stream.feed(kept, self._arrived(now), prefilter), *self.stream.flush(now)]
        if placed or lines:
            self._runner.take(self, lines)
        self._runner.add_excerpts(self)
        self._has_caught_up = self._has_caught_up or not self.file.has_more
        return self.file.has_more

    def _arrived(self, now: datetime) -> datetime:
        """Return `now`, or the last write while content from before the start is read."""
        if self._has_caught_up or self.file.written_at <= 0:
            return now
        return min(now, datetime.fromtimestamp(self.file.written_at, UTC))

    def has_origin(self, origin: Origin) -> bool:
        return replace(origin, stream=self.origin.stream, generation=self.origin.generation) == self.origin

    def change_origin(self, origin: Origin) -> None:
        lines = self.stream.flush(None)
        if lines:
            self._runner.take(self, lines)
        self.origin = replace(origin, stream=self.origin.stream)
        self.stream = self._new_stream(self.stream.to_json())

    def end(self, now: datetime) -> None:
        """Process what is unfinished, close the file and forget its position. Raises OSError."""
        try:
            self._end_stream(now)
        finally:
            self.file.close()
        self._runner.forget(self.key)

    def _restart(self, now: datetime) -> None:
        self._end_stream(now)
        self._runner.forget(self.key)
        self._counters.truncations += 1
        if self._arrivals is not None:
            self._arrivals.forget(self._file_key)
        self.file.restart(microseconds(now))
        self._position = self.file.position(None)
        self.stream = self._new_stream({})
        self.begin()

    def _end_stream(self, now: datetime) -> None:
        lines = [*self.stream.feed(self.file.take_unfinished_line(), now), *self.stream.flush(None)]
        if lines:
            self._runner.take(self, lines)
        self.stream.excerpts = [replace(each, due=0.0) for each in self.stream.excerpts]
        self._runner.add_excerpts(self)

    def _new_stream(self, kept: Mapping[str, Any]) -> LineStream:
        self.origin = replace(self.origin, generation=self._position.generation)
        stream = LineStream(self.origin, None, kept)
        stream.owner = self.file.owner
        return stream


def followed_by(
    runner: RuleRunner,
    counters: LogCounters,
    max_lines: int,
    arrivals: ArrivalIndex | None = None,
    of_jobs: LinesOfJobs | None = None,
) -> Callable[[GrowingFile, KnownFile, float], FollowedFile]:
    """Return a factory of followed files.

    The rules process `max_lines` per second of each file, and per job as `of_jobs` allows; of the kernel's log all.
    """

    def follow(file: GrowingFile, known: KnownFile, monotonic: float) -> FollowedFile:
        is_kernel = known.origin.source in KERNEL_SOURCES
        budget = LineBudget(None if is_kernel else max_lines)
        return FollowedFile(file, known, budget, runner, counters, monotonic, arrivals, None if is_kernel else of_jobs)

    return follow


def microseconds(at: datetime) -> int:
    return round(at.timestamp() * 1e6)


def known_file(kept: Mapping[str, Any]) -> KnownFile | None:
    """Return None if invalid or no file."""
    try:
        place = kept["place"]
        return KnownFile(FilePosition.of_json(place["file"]), Origin(**place["origin"]), kept["stream"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
