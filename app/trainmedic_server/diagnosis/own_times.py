"""Step times, data waiting times and loss of a job, from its own log alone."""

from __future__ import annotations

import re
from collections import deque
from statistics import median

from msgspec import Struct, field

from trainmedic_server.diagnosis.slow import RankStep

_TIME = re.compile(r"\b(?:batch[ _]?)?[Tt]ime:? {1,3}(\d{1,6}\.\d{1,9})")
_DATA = re.compile(r"\b[Dd]ata(?:[ _]time)?:? {1,3}(\d{1,6}\.\d{1,9})")
_LAST = 5
"""Number of recent steps by which a job is called slow. Earlier steps may have been fast."""
_ROSE_BY, _ROSE_TIMES = 1.0, 2.0


class LossRise(Struct, frozen=True):
    """Loss that was lower before."""

    lowest: float
    last: float
    line: str
    """Line of the last loss."""


class OwnTimes(Struct):
    """Times and losses in the lines of one stream."""

    parts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_LAST))
    """Total seconds and data waiting seconds of the last steps."""
    lowest: float | None = None
    rise: LossRise | None = None

    def line(self, text: str) -> None:
        """Read a line, which may state the time of a step and its data waiting time."""
        if "ata" in text and (data := _DATA.search(text)) and (whole := _TIME.search(text)):
            self.parts.append((float(whole[1]), min(float(data[1]), float(whole[1]))))

    def loss(self, loss: float, text: str) -> None:
        """Read the loss of a step. A rise is forgotten once the loss is down again."""
        lowest = loss if self.lowest is None else min(self.lowest, loss)
        self.lowest = lowest
        has_risen = lowest >= 0 and loss > lowest + _ROSE_BY and loss > lowest * _ROSE_TIMES
        self.rise = LossRise(lowest, loss, text[:500]) if has_risen else None

    def step(self) -> RankStep | None:
        """Return the medians of the last steps. None until there are enough of them."""
        if len(self.parts) < _LAST:
            return None
        whole, data = (median(part) for part in zip(*self.parts, strict=True))
        return RankStep(data, max(whole - data, 0.0), 0.0)
