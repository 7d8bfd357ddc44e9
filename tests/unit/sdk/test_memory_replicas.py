"""Copies of other ranks' in-memory checkpoints, while the training reads which there are."""

from __future__ import annotations

import mmap
import tracemalloc
import zlib
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainmedic.errors import NotAgreed, TrainmedicError
from trainmedic.job.group import PATIENCE, SingleRankGroup
from trainmedic.recovery import memory_slots
from trainmedic.recovery import replicas as replicas_of_ranks
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.memory_pool import SlotPool
from trainmedic.recovery.memory_slots import Slot, SlotMark
from trainmedic.recovery.replicas import ReplicaServer

pytest.importorskip("torch")

from trainmedic.torch.memory.memory_checkpoints import Course, MemoryCheckpoints
from trainmedic.torch.memory.memory_replicas import MemoryReplicas, _time_of
from trainmedic.torch.memory.memory_start import Memory, MemoryStart

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


class ClearedSlot:
    """Slot whose mark is cleared by another thread right after it is read."""

    def __init__(self, mark: SlotMark) -> None:
        self._marks: list[SlotMark | None] = [mark]

    @property
    def mark(self) -> SlotMark | None:
        return self._marks.pop() if self._marks else None


def cleared_slot() -> ClearedSlot:
    return ClearedSlot(SlotMark("memory-step-00000020-a-0", 20, "2026-01-01T00:00:20Z", WARD, 8, 10, 0, 0))


def test_a_copy_that_is_cleared_while_it_is_looked_at_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training clears its own copies, and those of other ranks at a rollback."""
    monkeypatch.setenv(memory_slots.ENVIRONMENT, str(tmp_path))
    node = memory_slots.node_directory("run", "node-1")
    slot = cast(Any, cleared_slot())
    pool, cadence = SimpleNamespace(complete=lambda: [(slot.mark, slot)]), SimpleNamespace(replica_steps=10)
    replicas = MemoryReplicas(cast(Any, SimpleNamespace(pool=pool, cadence=cadence)), WARD, node, b"secret")
    try:
        found = replicas._newest_to_copy({"rank": WARD, "multiple_of": 10, "other_than": None})
        assert found is not None
        replicas._slots[WARD] = [cast(Any, cleared_slot()), cast(Any, cleared_slot())]
        # No other rank answers there, which is the only error.
        with pytest.raises((OSError, TrainmedicError)):
            replicas._update(WARD, ("127.0.0.1", 1))
        assert _time_of(cast(Any, cleared_slot())) == "2026-01-01T00:00:20Z"
    finally:
        replicas.end(in_order=False)


def test_a_part_is_copied_without_a_second_copy_in_between() -> None:
    """It may be most of the node's memory."""
    start = MemoryStart(cast(Any, SimpleNamespace()), Memory(), "llm-1", None)
    size = 1 << 22
    source, pool = mmap.mmap(-1, size), SlotPool(2, 2 * size, None)
    source[-1] = 7
    mark = SlotMark("memory-step-00000020-a-0", 20, "2026-01-01T00:00:20Z", 0, 1, size, 0, 0)
    tracemalloc.start()
    try:
        start._copy(source, mark, pool)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pool.complete()[0][1].memory[size - 1] == 7
    assert most < size // 4


class SilentGroup(SingleRankGroup):
    """Group whose other ranks do not answer."""

    def poll(self, value: Any = None, patience: float = PATIENCE) -> Any:
        raise NotAgreed("rank 1 did not report")


def test_a_second_start_closes_the_server_of_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory_slots.ENVIRONMENT, str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    options = Memory(replica_every=60.0)
    start = MemoryStart(cast(Any, SimpleNamespace()), options, "llm-1", tmp_path / "checkpoints")
    servers: list[ReplicaServer] = []
    try:
        for _ in range(2):
            with pytest.raises(NotAgreed):
                start.begin(SilentGroup(), None)
            assert start._replicas is not None
            servers.append(start._replicas._server)
        assert [server._thread.is_alive() for server in servers] == [False, True]
    finally:
        for server in servers:
            if server._thread.is_alive():
                server.close()
        assert start._lock is not None
        start._lock.release()


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_dropped_step_is_not_copied_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Its rank may drop it later than this one."""
    monkeypatch.setenv(memory_slots.ENVIRONMENT, str(tmp_path))
    node = memory_slots.node_directory("run", "node-1")
    memory = MemoryCheckpoints(
        cast(Any, SimpleNamespace()), cast(Any, None), cast(Any, SimpleNamespace(replica_steps=10))
    )
    replicas = MemoryReplicas(memory, 0, node, b"secret")
    memory.begin(Course("a"), SlotPool(2, 100, None), replicas)
    replicas._slots[WARD] = []
    served = 20

    def fetch(*given: Any) -> SlotMark:
        content = bytes(10)
        mark = SlotMark(
            memory.course.set_id(served), served, "2026-01-01T00:00:20Z", WARD, 8, 10, 0, zlib.crc32(content)
        )
        given[-1](mark)[:] = content
        if moment == "during":
            memory.drop_after(10, until=20)
        return mark

    monkeypatch.setattr(replicas_of_ranks, "fetch", fetch)
    try:
        if moment == "before":
            memory.drop_after(10, until=20)
        replicas._update(WARD, ("127.0.0.1", 1))
        assert steps_in(replicas) == []
        served = 30
        replicas._update(WARD, ("127.0.0.1", 1))
        assert steps_in(replicas) == [30]
    finally:
        replicas.end(in_order=False)
        memory.close()


def test_a_rollback_has_its_new_course_before_copies_are_dropped() -> None:
    """A copy that is completed in between would stay."""
    seen: list[int] = []
    memory = MemoryCheckpoints(
        cast(Any, SimpleNamespace()), cast(Any, None), cast(Any, SimpleNamespace(replica_steps=10))
    )
    dropping = SimpleNamespace(drop_after=lambda step, until: seen.append(memory.course.rollbacks))
    memory.begin(Course("a"), SlotPool(2, 100, None), dropping)
    memory.pace = cast(Any, SimpleNamespace(reset_agreement=lambda: None))
    memory.rolled_back_to(SavedCheckpoint(10, datetime(2026, 1, 1, tzinfo=UTC), "x"), 20)
    memory.close()
    assert seen == [1]
