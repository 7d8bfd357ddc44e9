"""Copies of other ranks' in-memory checkpoints, while the training reads which there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainmedic.recovery import memory_slots
from trainmedic.recovery.memory_slots import Slot

pytest.importorskip("torch")

from trainmedic.torch.memory.memory_replicas import MemoryReplicas

WARD = 7


def steps_in(replicas: MemoryReplicas) -> list[int]:
    return [mark.step for slot in replicas._slots[WARD] if (mark := slot.mark) is not None]


class ObservingMark:
    """Mark that reads the copied steps while its time is compared, as another thread may."""

    def __init__(self, replicas: MemoryReplicas, step: int, seen: list[list[int]]) -> None:
        self.step = step
        self._replicas = replicas
        self._seen = seen

    @property
    def at(self) -> str:
        self._seen.append(sorted(steps_in(self._replicas)))
        return f"2026-01-01T00:00:{self.step:02d}Z"


def test_a_choice_of_the_next_slot_hides_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory_slots.ENVIRONMENT, str(tmp_path))
    node = memory_slots.node_directory("run", "node-1")
    replicas = MemoryReplicas(cast(Any, SimpleNamespace()), 0, node, b"secret")
    try:
        seen: list[list[int]] = []
        slots = [Slot(10, None), Slot(10, None)]
        for slot, step in zip(slots, (20, 10), strict=True):
            slot.mark = cast(Any, ObservingMark(replicas, step, seen))
        replicas._slots[WARD] = slots
        older = replicas._free_slot(WARD, slots, 10)
        assert seen == [[10, 20], [10, 20]]
        assert older is slots[1]
        assert steps_in(replicas) == [20]
    finally:
        replicas.end(in_order=False)
