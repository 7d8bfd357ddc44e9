"""In-memory checkpoints: every few steps a copy of the training's state in the host's memory.

A copy is taken at a step boundary into a slot of memory that was made before. Training waits for the copy alone;
its checksum and its mark, which comes last, are made in the background. Each rank keeps what it holds itself. A
checkpoint is one of all ranks where each has its part: going back to one, they agree on that, as on one of the disk.

Not here: how often (``memory_pace``), the memory (``recovery.memory_slots``, ``recovery.memory_pool``),
what an earlier process has left (``memory_survivors``), the checkpoints on the disk (``checkpoint_storage``).
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol, Sequence

import torch

from trainmedic.errors import NotAgreed
from trainmedic.job.group import Group
from trainmedic.recovery.background import BackgroundThread
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.memory_cadence import MemoryCadence
from trainmedic.recovery.memory_pool import SlotPool
from trainmedic.recovery.memory_slots import Slot, SlotMark, UntrustedMemory
from trainmedic.torch.checkpoints.checkpoint_storage import HalfLoaded, PartlyLoaded, UnusableCheckpoint
from trainmedic.torch.checkpoints.digests import all_finite, digests_of
from trainmedic.torch.memory import snapshots
from trainmedic.torch.memory.memory_contents import MemoryContents
from trainmedic.torch.memory.memory_pace import MemoryPace
from trainmedic.torch.memory.snapshots import Place, Snapshot, SnapshotTaker
from trainmedic.torch.rank_agreement import FailedOnSomeRanks, first_line, on_all_ranks
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

PREFIX = "memory-step-"
NEVER = sys.maxsize
_PATIENCE = 60.0  # seconds for what is under way in the background
_FAILURES = 3  # in a row, after which no more copies are made

COPIED = 2
"""Checkpoints that are kept for the other nodes, beside the newest."""

NewGroup = Callable[[str], Group]


@dataclass(frozen=True)
class Course:
    """Which training the checkpoints are of, so that parts of different ones are never put together."""

    name: str
    """Chosen anew whenever the processes start."""
    turn: int = 0
    """How many rollbacks it has seen."""

    def set_id(self, step: int) -> str:
        return f"{PREFIX}{step:08d}-{self.name}-{self.turn}"


def is_in_memory(checkpoint: SavedCheckpoint) -> bool:
    return isinstance(checkpoint.path, str) and checkpoint.path.startswith(PREFIX)


class Replicas(Protocol):
    """Copies of other ranks' checkpoints."""

    def drop(self, step: int) -> None:
        """Forget those of later steps than that."""
        ...


class MemoryCheckpoints:
    """The in-memory checkpoints of this rank. ``new_group`` gives the group of all ranks for a name."""

    def __init__(
        self,
        job: str,
        rank: int,
        world_size: int,
        new_group: NewGroup,
        contents: MemoryContents,
        cadence: MemoryCadence,
    ) -> None:
        self.course = Course("")
        self.pool: SlotPool | None = None
        """The slots; None before `begin`."""
        self.background = BackgroundThread("trainmedic-memory")
        self.cadence = cadence
        self.pace = MemoryPace(job, world_size, new_group, cadence)
        self._job = job
        self._rank = rank
        self._world_size = world_size
        self._new_group = new_group
        self._contents = contents
        self._failures = 0
        self._is_hidden = False  # whether what is complete could not be marked for other processes
        self._latest: tuple[str, Slot] | None = None
        self._judging: tuple[Sequence[Place], Sequence[int]] = ((), ())
        self._taker: SnapshotTaker | None = None
        # The checkpoint that the last rollback went back to, and the step that it left.
        self._target: tuple[str, int] | None = None
        self.replicas: Replicas | None = None
        """The copies of other ranks' checkpoints; None without them."""

    def begin(self, course: Course, pool: SlotPool, replicas: Replicas | None = None) -> None:
        self.course, self.pool, self.replicas = course, pool, replicas

    def next_due(self, step: int) -> int:
        """The first step after that one at which `save` is to be called; `NEVER` where it need not be any more."""
        return NEVER if self.pace.is_over else self.cadence.next_due(step)

    # --- writing ----------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        parts: StateParts,
        run: Callable[[], Mapping[str, Any]],
        health: Callable[[], CheckpointHealth],
        step_seconds: float | None,
    ) -> None:
        """Copy the present state. ``run`` gives the run's own state, ``step_seconds`` is how long a step takes.

        Every rank calls it at the same steps, for now and then they agree on how often. What fails is logged.
        """
        slot = None
        began = time.perf_counter()
        try:
            if self._works:
                slot = self.copy(step, parts, run(), health())
                self._failures = 0
        except Exception as error:  # whatever a state_dict or pickling raises: it costs a checkpoint, not the training
            self._failures += 1
            what = "training goes on" if self._works else "no more are made"
            log.warning("%s: no in-memory checkpoint of step %d, %s: %s", self._job, step, what, first_line(error))
        if slot is not None:
            self.pace.record(time.perf_counter() - began)
        self.pace.adapt(step, step_seconds, self._works)

    @property
    def _works(self) -> bool:
        return self.pool is not None and not self.pool.problem and self._failures < _FAILURES

    def copy(
        self, step: int, parts: StateParts, run: Mapping[str, Any], health: CheckpointHealth, holds: bool = False
    ) -> Slot | None:
        """Copy the state into a slot, which is complete some time later; None where there is no slot just now.

        With ``holds`` the slot is not written to again until the caller has released it.
        """
        pool = self.pool
        if pool is None or not self._works:
            return None
        set_id = self.course.set_id(step)
        if self._latest is not None and self._latest[0] == set_id:
            if holds:
                pool.hold(self._latest[1])
            return self._latest[1]
        at = envelope.write_time(envelope.utc_now())
        state = {"training": self._contents.held(parts), "run": run}
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
        except BaseException:  # an interrupt, too, gives the slot back; it has no mark, so it counts for nothing
            pool.release(slot)
            raise
        self._latest = (set_id, slot)
        if holds:
            pool.hold(slot)
        sizes = {"size": snapshot.size, "structure": snapshot.begins, "checksum": 0}
        mark = SlotMark(set_id, step, at, self._rank, self._world_size, **sizes, health=health.to_json())
        judged = self._judged(snapshot, parts, state["training"])
        self.background.submit(lambda: self._complete(pool, slot, mark, judged))
        return slot

    def _judged(self, snapshot: Snapshot, parts: StateParts, held: Any) -> Sequence[int]:
        """Which of the tensors are parameters or of an optimizer: these are to be finite. Found once for a layout."""
        if self._judging[0] is not snapshot.places:
            try:
                judged = {tensor.data_ptr() for tensor in self._contents.tensors(parts, held).values()}
            except (LookupError, TypeError, AttributeError):  # an optimizer whose state is of a form of its own
                judged = set()
            numbers = [number for number, tensor in enumerate(snapshot.tensors) if tensor.data_ptr() in judged]
            self._judging = snapshot.places, numbers
        return self._judging[1]

    def _kept(self, pool: SlotPool, step: int) -> set[str]:
        """What has to stay: where the last rollback went, until training is past the step that it left; and what is
        copied to other nodes, until all of them have the next."""
        every = self.cadence.replica_steps
        marks = [slot.mark for slot in pool.complete() if slot.mark is not None]
        kept = {mark.set_id for mark in [mark for mark in marks if every and mark.step % every == 0][-COPIED:]}
        if self._target is not None and step <= self._target[1]:
            kept.add(self._target[0])
        return kept

    def _complete(self, pool: SlotPool, slot: Slot, mark: SlotMark, judged: Sequence[int]) -> None:
        try:
            views = _views(slot, None)
            finite = {"finite": all_finite(views[number] for number in judged)} if judged else {}
            facts = {"checksum": slot.checksum(mark.size), "health": {**(mark.health or {}), **finite}}
            slot.complete(SlotMark(**{**vars(mark), **facts}))
        except OSError as error:  # what is mapped stays, whatever becomes of the file's name
            if not self._is_hidden:
                self._is_hidden = True
                log.warning("%s: a restart will not find the checkpoints in memory: %s", self._job, error)
        finally:
            pool.release(slot)

    def _provide(self, pool: SlotPool, size: int) -> None:
        try:
            pool.provide(size)
        except OSError as error:
            pool.problem = f"the memory cannot be had: {error}"
            pool.clear()
        if pool.problem:
            log.warning("%s: no in-memory checkpoints on rank %d: %s", self._job, self._rank, pool.problem)
        else:
            log.info("%s: %d slots of %.0f MB for in-memory checkpoints", self._job, pool.count, size / 1e6)

    # --- reading ----------------------------------------------------------------------------------------

    def checkpoints(self) -> list[SavedCheckpoint]:
        """The complete ones on this rank."""
        if self.pool is None:
            return []
        marks = [slot.mark for slot in self.pool.complete() if slot.mark is not None]
        return [
            SavedCheckpoint(
                mark.step, envelope.read_time(mark.at), mark.set_id, health=CheckpointHealth.from_json(mark.health)
            )
            for mark in marks
        ]

    def load(self, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any]:
        """As `CheckpointStorage.load`. Every rank calls it."""
        group = self._new_group(f"load-{checkpoint.path}")
        is_there = False
        try:
            slot = on_all_ranks(group, lambda: self._find(checkpoint))
            is_there = True
            state = on_all_ranks(group, lambda: self._read(slot, checkpoint, parts))
        except FailedOnSomeRanks as error:
            raise UnusableCheckpoint(f"{checkpoint.name} cannot be loaded: {error}") from error
        except NotAgreed as error:
            if not is_there:
                raise
            # This rank may have reported that it has read all of it; so the others may be putting it into place now.
            raise HalfLoaded(f"it is not known whether the other ranks load {checkpoint.name}: {error}") from error
        try:
            self._contents.put_back(parts, state["training"])
        except Exception as error:  # whatever a load_state_dict raises; the parts before it are loaded by now
            if self._world_size > 1:
                raise
            reason = f"{checkpoint.name} was loaded in part: {type(error).__name__}: {error}"
            raise PartlyLoaded(reason) from error
        return self._with_digests(parts, state)

    def _with_digests(self, parts: StateParts, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The run's own state. By the checksum what was copied is whole, so its digests are those of what was saved."""
        run: Mapping[str, Any] = state["run"]
        if run.get("digests") is not None:
            return run
        try:
            return {**run, "digests": digests_of(self._contents.tensors(parts, state["training"]))}
        except (LookupError, TypeError, AttributeError):  # an optimizer whose state is of a form of its own
            return run

    def wait_until_whole(self, slot: Slot, step: int) -> SlotMark:
        """Wait for the copy of that step in `slot`, which the caller holds. Raises UnusableCheckpoint."""
        self.background.settle(_PATIENCE)
        mark = slot.mark
        if mark is None or mark.step != step:
            raise UnusableCheckpoint(f"the copy of step {step} in memory is not whole")
        return mark

    def views(self, slot: Slot, mark: SlotMark, parts: StateParts) -> Mapping[str, Any]:
        """The state in a slot, which the caller holds; its tensors are the slot's memory itself."""
        meshes = self._contents.meshes(parts)
        state: Mapping[str, Any] = snapshots.read(slot.memory, mark.structure, mark.size, meshes, copies=False)
        return state

    def rolled_back_to(self, checkpoint: SavedCheckpoint, left_step: int) -> None:
        """Forget what was copied after `checkpoint`, and keep that one until training is past the step it left."""
        self.forget_after(checkpoint.step)
        self.course = Course(self.course.name, self.course.turn + 1)
        self._target = (checkpoint.path, left_step) if is_in_memory(checkpoint) else None
        self.pace.agree_anew()

    def forget_after(self, step: int) -> None:
        """Forget what was copied after that step, by an earlier process, too."""
        self.background.settle(_PATIENCE)
        if self.pool is not None:
            self.pool.drop(step)
        if self.replicas is not None:
            self.replicas.drop(step)

    def close(self) -> None:
        """End what runs in the background. What is in memory stays there."""
        self.background.close(_PATIENCE)

    def _find(self, checkpoint: SavedCheckpoint) -> Slot:
        self.background.settle(_PATIENCE)
        slot = self.pool.find(checkpoint.path) if self.pool is not None else None
        if slot is None:
            raise UnusableCheckpoint(f"{checkpoint.name} is not in the memory of rank {self._rank}")
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
    """The views of a slot's memory, which are the same from one copy to the next as long as the places are.

    Without a snapshot those of the present one.
    """
    places, views = slot.cache or (None, [])
    if snapshot is not None and places != snapshot.places:
        views = snapshots.views_of(slot.memory, snapshot.places)
        slot.cache = (snapshot.places, views)
    return views
