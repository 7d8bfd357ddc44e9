from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import datetime
from statistics import median
from typing import Any

from msgspec import Struct, field

from trainmedic_logs.diagnosis.facts import RankFacts
from trainmedic_logs.diagnosis.slow import RankStep

_STEPS_KEPT = 100


class RankSeen(Struct):
    """Mutable form of `RankFacts`."""

    node: str = ""
    is_node_sure: bool = False
    gpu: str | None = None  # set, as `pid`, through `note_rank`
    pid: int | None = None
    last_step: int | None = None
    last_step_at: datetime | None = None
    last_line_at: datetime | None = None
    was_read: bool = False
    memory_ratio: float | None = None
    parts: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    """Data, compute and wait seconds."""

    def note_line(self, at: datetime) -> None:
        if self.last_line_at is None or at > self.last_line_at:
            self.last_line_at = at

    def note_node(self, of_stream: str, of_record: object) -> None:
        """Prefer the file's node to the job's statement."""
        if of_stream and not self.is_node_sure:
            self.node, self.is_node_sure = of_stream, True
        elif not self.node and isinstance(of_record, str):
            self.node = of_record

    def note_step(self, step: int, at: datetime) -> None:
        if self.last_step is None or step >= self.last_step:
            self.last_step, self.last_step_at = step, at

    def note_parts(self, record: Mapping[str, Any]) -> None:
        parts = [record.get(name) for name in ("data_s", "compute_s", "wait_s")]
        numbers = [float(part) for part in parts if isinstance(part, int | float) and 0 <= part < 1e6]
        if len(numbers) == 3:
            self.parts.append((numbers[0], numbers[1], numbers[2]))
            ratio = record.get("gpu_memory_ratio")
            self.memory_ratio = float(ratio) if isinstance(ratio, int | float) else self.memory_ratio

    def facts(self) -> RankFacts:
        return RankFacts(
            node=self.node,
            is_node_sure=self.is_node_sure,
            gpu=self.gpu,
            pid=self.pid,
            last_step=self.last_step,
            last_step_at=self.last_step_at,
            last_line_at=self.last_line_at,
            was_read=self.was_read,
        )

    def rank_step(self) -> RankStep:
        """Requires `parts`."""
        data, compute, wait = (median(part) for part in zip(*self.parts, strict=True))
        return RankStep(data, compute, wait, self.memory_ratio, self.node)
