"""Copies of the training state in host memory every few steps.

Training waits only for the copy. A checkpoint counts if every rank has its part.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol, Sequence

import torch

from trainmedic.errors import described, is_explained
from trainmedic.job.group import Ranks
from trainmedic.recovery.background import BackgroundThread
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.memory_cadence import MemoryCadence
from trainmedic.recovery.memory_pool import SlotPool
from trainmedic.recovery.memory_slots import Slot, SlotMark, UntrustedMemory
from trainmedic.torch.checkpoints.checkpoint_storage import PartlyLoaded, UnusableCheckpoint, read_jointly
from trainmedic.torch.checkpoints.digests import all_finite, digests_of
from trainmedic.torch.memory import snapshots
from trainmedic.torch.memory.memory_contents import MemoryContents
from trainmedic.torch.memory.memory_pace import MemoryPace
from trainmedic.torch.memory.snapshots import Place, Snapshot, SnapshotTaker
from trainmedic.torch.rank_agreement import first_line
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

PREFIX = "memory-step-"  # of checkpoints' IDs, which stand in the place of paths
NEVER = sys.maxsize  # step
_PATIENCE = 60.0  # seconds that a caller waits for pending background work before it goes on without it
_MOST_FAILURES = 3  # consecutive, until no more copies are made

COPIED = 2  # newest checkpoints that other nodes may be copying, and which stay for that


@dataclass(frozen=True)
class Course:
    """Identity of the steps between two rollbacks. Parts of different ones are never combined."""

    name: str  # random, from each `MemoryStart.begin`; "" before
    rollbacks: int = 0

    def set_id(self, step: int) -> str:
        return f"{PREFIX}{step:08d}-{self.name}-{self.rollbacks}"


def is_in_memory(checkpoint: SavedCheckpoint) -> bool:
    return isinstance(checkpoint.path, str) and checkpoint.path.startswith(PREFIX)


class Replicas(Protocol):
    def drop_after(self, step: int, until: int) -> None: ...


class MemoryCheckpoints:
    def __init__(self, ranks: Ranks, contents: MemoryContents, cadence: MemoryCadence) -> None:
        self.course = Course("")
        self.pool: SlotPool | None = None  # None before `begin`
        self.background = BackgroundThread("trainmedic-memory")
        self.cadence = cadence
        self.pace = MemoryPace(ranks, cadence)
        self._ranks = ranks
        self._contents = contents
        self._failures = 0
        self._has_warned_of_marks = False
        self._latest: tuple[str, Slot] | None = None  # set ID, and slot
        # Places of the last snapshot, and the numbers of its tensors whose values must be finite.
        self._finite_tensors: tuple[Sequence[Place], Sequence[int]] = ((), ())
        self._taker: SnapshotTaker | None = None
        # Set ID of the last rollback's checkpoint, and the step before that rollback.
        self._rollback_target: tuple[str, int] | None = None
        self.replicas: Replicas | None = None  # None without copies

    def begin(self, course: Course, pool: SlotPool, replicas: Replicas | None = None) -> None:
        self.course, self.pool, self.replicas = course, pool, replicas

    def next_due(self, step: int) -> int:
        return NEVER if self.pace.is_over else self.cadence.next_due(step)

    def save(
        self,
        step: int,
        parts: StateParts,
        run: Callable[[], Mapping[str, Any]],
        health: Callable[[], CheckpointHealth],
        step_seconds: float | None,
    ) -> None:
        """Copy the state, adapt the interval, log failures. All ranks call it at the same steps."""
        slot = None
        began = time.perf_counter()
        try:
            if self._works:
                slot = self.copy(step, parts, run(), health())
                self._failures = 0
        except Exception as error:  # any error of a state_dict or pickling costs only this checkpoint
            self._failures += 1
            what = "training continues" if self._works else "no more are made"
            message = "%s: no in-memory checkpoint of step %d, %s: %s"
            log.warning(message, self._ranks.job, step, what, first_line(error), exc_info=not is_explained(error))
        if slot is not None:
            self.pace.record(time.perf_counter() - began)
        self.pace.adapt(step, step_seconds, self._works)

    @property
    def _works(self) -> bool:
        return self.pool is not None and not self.pool.problem and self._failures < _MOST_FAILURES

    def copy(
        self, step: int, parts: StateParts, run: Mapping[str, Any], health: CheckpointHealth, holds: bool = False
    ) -> Slot | None:
        """Return a slot with the copy; None without a free one. ``holds``: the caller releases it."""
        pool = self.pool
        if pool is None or not self._works:
            return None
        set_id = self.course.set_id(step)
        if self._latest is not None and self._latest[0] == set_id:  # copied for a write to disk at this step
            if holds:
                pool.hold(self._latest[1])
            return self._latest[1]
        at = envelope.write_time(envelope.utc_now())
        state = {"training": self._contents.capture(parts), "run": run}
        if self._taker is None:
            self._taker = SnapshotTaker(self._contents.meshes(parts))
        snapshot = self._taker.take(state)
        pool.kept = self._kept(pool, step)
        slot = pool.take(snapshot.size, step, self.cadence.horizon)
        if slot is None:
            if pool.needs(snapshot.size) and self.background.is_idle:
                self.background.submit(lambda: self._provide(pool, snapshot.size))
            return None
        try:
            with torch.no_grad():
                snapshot.copy(slot.memory, _views(slot, snapshot))
        except BaseException:  # also after an interrupt; a slot without a mark does not count
            pool.release(slot)
            raise
        self._latest = (set_id, slot)
        if holds:
            pool.hold(slot)
        sizes = {"size": snapshot.size, "structure": snapshot.structure_offset, "checksum": 0}
        mark = SlotMark(set_id, step, at, self._ranks.rank, self._ranks.world_size, **sizes, health=health.to_json())
        checked = self._tensors_to_check(snapshot, parts, state["training"])
        self.background.submit(lambda: self._complete(pool, slot, mark, checked))
        return slot

    def _tensors_to_check(self, snapshot: Snapshot, parts: StateParts, held: Any) -> Sequence[int]:
        # Those whose values must be finite, by number.
        if self._finite_tensors[0] is not snapshot.places:
            try:
                addresses = {tensor.data_ptr() for tensor in self._contents.tensors(parts, held).values()}
            except (LookupError, TypeError, AttributeError):  # nonstandard optimizer state
                addresses = set()
            numbers = [number for number, tensor in enumerate(snapshot.tensors) if tensor.data_ptr() in addresses]
            self._finite_tensors = snapshot.places, numbers
        return self._finite_tensors[1]

    def _kept(self, pool: SlotPool, step: int) -> set[str]:
        # IDs of checkpoints that a rollback or other nodes need.
        every = self.cadence.replica_steps
        copied = [mark for mark, _ in pool.complete() if every and mark.step % every == 0]
        kept = {mark.set_id for mark in copied[-COPIED:]}
        if self._rollback_target is not None and step <= self._rollback_target[1]:
            kept.add(self._rollback_target[0])
        return kept

    def _complete(self, pool: SlotPool, slot: Slot, mark: SlotMark, checked: Sequence[int]) -> None:
        # In the background thread.
        try:
            views = _views(slot, None)
            finite = {"finite": all_finite(views[number] for number in checked)} if checked else {}
            facts = {"checksum": slot.checksum(mark.size), "health": {**(mark.health or {}), **finite}}
            slot.complete(SlotMark(**{**vars(mark), **facts}))
        except OSError as error:  # of the mark's file; this process does not need it
            if not self._has_warned_of_marks:
                self._has_warned_of_marks = True
                log.warning("%s: a restart will not find the checkpoints in memory: %s", self._ranks.job, error)
        finally:
            pool.release(slot)

    def _provide(self, pool: SlotPool, size: int) -> None:
        try:
            pool.provide(size)
        except OSError as error:
            pool.problem = f"cannot allocate the memory: {error}"
            pool.clear()
        if pool.problem:
            log.warning("%s: no in-memory checkpoints on rank %d: %s", self._ranks.job, self._ranks.rank, pool.problem)
        else:
            log.info("%s: %d slots of %.0f MB for in-memory checkpoints", self._ranks.job, pool.count, size / 1e6)

    def checkpoints(self) -> list[SavedCheckpoint]:
        if self.pool is None:
            return []
        return [
            SavedCheckpoint(
                mark.step, envelope.read_time(mark.at), mark.set_id, health=CheckpointHealth.from_json(mark.health)
            )
            for mark, _ in self.pool.complete()
        ]

    def load(self, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any]:
        """Implement `CheckpointStorage.load`. Every rank calls it."""
        group = self._ranks.group(f"load-{checkpoint.path}")

        def read(slot: Slot) -> Mapping[str, Any]:
            return self._read(slot, checkpoint, parts)

        _, state = read_jointly(group, checkpoint.name, lambda: self._find(checkpoint), read)
        try:
            self._contents.put_back(parts, state["training"])
        except Exception as error:  # any error of load_state_dict; earlier parts are already loaded
            if self._ranks.world_size > 1:
                raise
            reason = f"{checkpoint.name} was loaded in part: {described(error)}"
            raise PartlyLoaded(reason) from error
        return self._with_digests(parts, state)

    def _with_digests(self, parts: StateParts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        run: Mapping[str, Any] = state["run"]
        if run.get("digests") is not None:
            return run
        try:
            return {**run, "digests": digests_of(self._contents.tensors(parts, state["training"]))}
        except (LookupError, TypeError, AttributeError):  # nonstandard optimizer state
            return run

    def wait_until_complete(self, slot: Slot, step: int) -> SlotMark:
        """Wait for a held slot's copy. Raises UnusableCheckpoint."""
        self.background.settle(_PATIENCE)
        mark = slot.mark
        if mark is None or mark.step != step:
            raise UnusableCheckpoint(f"the copy of step {step} in memory is incomplete")
        return mark

    def views(self, slot: Slot, mark: SlotMark, parts: StateParts) -> Mapping[str, Any]:
        """Return a held slot's state, sharing its memory."""
        meshes = self._contents.meshes(parts)
        state: Mapping[str, Any] = snapshots.read(slot.memory, mark.structure, mark.size, meshes, copies=False)
        return state

    def rolled_back_to(self, checkpoint: SavedCheckpoint, left_step: int) -> None:
        self.course = Course(self.course.name, self.course.rollbacks + 1)  # first, for copies by other threads
        self.drop_after(checkpoint.step)
        self._rollback_target = (checkpoint.path, left_step) if is_in_memory(checkpoint) else None
        self.pace.reset_agreement()

    def drop_after(self, step: int, until: int = 0) -> None:
        # No copy of a step up to `until` is completed later.
        self.background.settle(_PATIENCE)
        if self.pool is not None:
            self.pool.drop_after(step)
        if self.replicas is not None:
            self.replicas.drop_after(step, until)

    def close(self) -> None:
        """End background work; the memory stays."""
        self.background.close(_PATIENCE)

    def _find(self, checkpoint: SavedCheckpoint) -> Slot:
        self.background.settle(_PATIENCE)
        slot = self.pool.find(checkpoint.path) if self.pool is not None else None
        if slot is None:
            raise UnusableCheckpoint(f"{checkpoint.name} is not in the memory of rank {self._ranks.rank}")
        return slot

    def _read(self, slot: Slot, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any]:
        assert self.pool is not None
        with self.pool.using(slot):
            mark = slot.mark
            if mark is None or slot.checksum(mark.size) != mark.checksum:
                raise UnusableCheckpoint(f"{checkpoint.name} was damaged in memory")
            try:
                meshes = self._contents.meshes(parts)
                state: Mapping[str, Any] = snapshots.read(slot.memory, mark.structure, mark.size, meshes)
            except (*snapshots.UNREADABLE, UntrustedMemory) as error:
                raise UnusableCheckpoint(f"{checkpoint.name} cannot be read: {first_line(error)}") from error
        mismatch = self._contents.mismatch(parts, state["training"])
        if mismatch:
            raise UnusableCheckpoint(f"{checkpoint.name} is of another training: {mismatch}")
        return state


def _views(slot: Slot, snapshot: Snapshot | None) -> list[torch.Tensor]:
    # Tensors in the slot's memory; with None those of the last snapshot.
    places, views = slot.cached_views or (None, [])
    if snapshot is not None and places != snapshot.places:
        views = snapshots.views_of(slot.memory, snapshot.places)
        slot.cached_views = (snapshot.places, views)
    return views
