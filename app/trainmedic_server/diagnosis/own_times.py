"""A job that nobody but its own log tells of: how long its steps take, how long they wait for data, and its loss."""

from __future__ import annotations

import re
from collections import deque
from statistics import median

from msgspec import Struct, field

from trainmedic_server.diagnosis.slow import RankStep

_TIME = re.compile(r"\b(?:batch[ _]?)?[Tt]ime:? {1,3}(\d{1,6}\.\d{1,9})")
_DATA = re.compile(r"\b[Dd]ata(?:[ _]time)?:? {1,3}(\d{1,6}\.\d{1,9})")
_LAST = 5
"""Steps by which a job is called slow now; before that it may have been fast."""
_ROSE_BY, _ROSE_TIMES = 1.0, 2.0


class LossRise(Struct, frozen=True):
    """A loss that was lower before."""

    lowest: float
    last: float
    line: str
    """The line of the last one."""


class OwnTimes(Struct):
    """What the lines of one stream have told so far."""

    parts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_LAST))
    """Of its last steps the seconds in all, and those of waiting for data."""
    lowest: float | None = None
    rise: LossRise | None = None

    def line(self, text: str) -> None:
        """Take a line, which may state the time of a step and the part of it that is data's."""
        if "ata" in text and (data := _DATA.search(text)) and (whole := _TIME.search(text)):
            self.parts.append((float(whole[1]), min(float(data[1]), float(whole[1]))))

    def loss(self, loss: float, text: str) -> None:
        """Take the loss of a step. Forgets a rise once the loss is down again."""
        lowest = loss if self.lowest is None else min(self.lowest, loss)
        self.lowest = lowest
        has_risen = lowest >= 0 and loss > lowest + _ROSE_BY and loss > lowest * _ROSE_TIMES
        self.rise = LossRise(lowest, loss, text[:500]) if has_risen else None

    def step(self) -> RankStep | None:
        """Return the medians of its last steps; None where it has not told of so many."""
        if len(self.parts) < _LAST:
            return None
        whole, data = (median(part) for part in zip(*self.parts, strict=True))
        return RankStep(data, max(whole - data, 0.0), 0.0)
