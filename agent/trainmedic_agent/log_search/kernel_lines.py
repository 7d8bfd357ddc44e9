from __future__ import annotations

import select
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime

from trainmedic_agent.log_reading.kernel_log import KernelReader
from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_agent.log_search.line_clock import LineClock
from trainmedic_agent.log_search.line_filter import LineFilter
from trainmedic_agent.log_search.wanted_lines import FilePlace, ReadBudget, WantedLines
from trainmedic_logs.domain.finding import Origin

KERNEL = "kernel"
_WAIT_SECONDS = 0.5  # wait for the journal's next lines
_MOST_KERNEL_LINES = 200_000  # with more, no wait for further ones


class KernelLines(WantedLines):
    """Lines of this boot, with the places of `kernel_log`."""

    def __init__(
        self,
        reader: KernelReader,
        origin: Origin,
        places: Mapping[str, FilePlace],
        line_filter: LineFilter,
        budget: ReadBudget,
    ) -> None:
        """Read all lines. Raises OSError."""
        super().__init__(KERNEL, origin, line_filter, LineClock(datetime.now(UTC)), budget)
        self._lines: list[PlacedLine] = []
        while not budget.is_stopped and (more := reader.read() or self._wait_and_read(reader)):
            self._lines += more
        self.go_to(places.get(KERNEL, FilePlace()))

    def go_to(self, place: FilePlace) -> None:
        self.line_place = place
        self.clock.before = place.at
        self._following = (-1, None)
        self._waiting = deque(line for line in self._lines if line[0] >= place.offset)

    @property
    def place(self) -> FilePlace:
        following = self._lines[-1][0] + 1 if self._lines else self.line_place.offset
        return FilePlace(self._waiting[0][0] if self._waiting else following, False, self.clock.before)

    def _queue_lines(self) -> bool:
        return False

    def _wait_and_read(self, reader: KernelReader) -> list[PlacedLine]:
        """Wait briefly: a journal's process writes with pauses."""
        number = reader.fileno()
        if number is None or len(self._lines) > _MOST_KERNEL_LINES:
            return []
        poll = select.poll()  # select(2) takes no descriptor above 1023, of which a reader may have many
        poll.register(number, select.POLLIN)
        return reader.read() if poll.poll(_WAIT_SECONDS * 1000) else []
