"""The slots of one rank, made in the background. Thread-safe."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Iterator

from trainmedic.recovery.health import CheckpointHealth, problem
from trainmedic.recovery.memory_cadence import dispensable
from trainmedic.recovery.memory_slots import Slot, SlotMark

LEAST = 2  # slots: one is complete while the other is written
_SPARE = 1 / 16  # of a slot, for states that grow
_ROUND = 1 << 16  # bytes, of which a slot's size is a multiple


class SlotPool:
    """At most ``wanted`` slots of together ``limit`` bytes, in ``directory`` or private memory (None)."""

    def __init__(self, wanted: int, limit: int, directory: Path | None) -> None:
        self.problem = ""  # why there can be no slots
        self.kept: set[str] = set()  # IDs of checkpoints that stay while others can go
        self._wanted = max(wanted, LEAST)
        self._limit = limit
        self._directory = directory
        self._slots: list[Slot] = []
        self._lock = threading.RLock()
        self._provided_size = 0  # bytes per slot; 0 before `provide`
        self._number = 0  # of the next file

    @property
    def count(self) -> int:
        return len(self._slots)

    def add(self, slot: Slot) -> None:
        with self._lock:
            self._slots.append(slot)

    def make(self, size: int) -> Slot:
        slot = Slot(size, self._free_file())
        self.add(slot)
        return slot

    def complete(self) -> list[tuple[SlotMark, Slot]]:
        with self._lock:
            marked = [(mark, slot) for slot in self._slots if (mark := slot.mark) is not None]
        return sorted(marked, key=lambda pair: pair[0].step)

    def find(self, set_id: str) -> Slot | None:
        return next((slot for mark, slot in self.complete() if mark.set_id == set_id), None)

    @contextlib.contextmanager
    def using(self, slot: Slot) -> Iterator[Slot]:
        self.hold(slot)
        try:
            yield slot
        finally:
            self.release(slot)

    def hold(self, slot: Slot) -> None:
        with self._lock:
            slot.users += 1

    def release(self, slot: Slot) -> None:
        with self._lock:
            slot.users -= 1

    def take(self, size: int, step: int, horizon: int) -> Slot | None:
        """Return a slot until `release`; None without a free one."""
        # ``step`` is the new checkpoint's, ``horizon`` that of `dispensable`.
        with self._lock:
            idle = [slot for slot in self._slots if not slot.users]
            for slot in [slot for slot in idle if slot.size < size and not self._is_needed(slot)]:
                self._remove(slot)
                idle.remove(slot)
            fitting = [slot for slot in idle if slot.mark is None and slot.size >= size]
            if not fitting and self._provided_size >= size:
                victim = self._dispensable(idle, size, step, horizon)
                if victim is not None:
                    victim.clear()
                    fitting = [victim]
            if not fitting:
                return None
            fitting[0].users += 1
            return fitting[0]

    def needs(self, size: int) -> bool:  # whether `provide` is to be called
        return self._provided_size < size and not self.problem

    def provide(self, size: int) -> None:
        """Make slots of ``size`` bytes, as many as allowed. Raises OSError."""
        size = -(-int(size * (1 + _SPARE)) // _ROUND) * _ROUND
        count = min(self._wanted, self._limit // size)
        if count < LEAST:
            self.problem = (
                f"{LEAST} slots of {_megabytes(size)} are needed, but the limit is {_megabytes(self._limit)}: "
                "raise Memory(limit=...)"
            )
            self.clear()
            return
        with self._lock:
            spare = self._limit - count * size
            outgrown = [slot for slot in self._slots if slot.size < size and not slot.users]
            for slot in sorted(outgrown, key=_step, reverse=True):
                if self._is_needed(slot) and slot.size <= spare:
                    spare -= slot.size
                else:
                    self._remove(slot)
        while sum(slot.size >= size for slot in self._slots) < count:
            self.make(size)
        self._provided_size = size

    def drop_after(self, step: int) -> None:
        with self._lock:
            for mark, slot in self.complete():
                if mark.step > step:
                    slot.clear()

    def clear(self) -> None:
        with self._lock:
            for slot in [slot for slot in self._slots if not slot.users]:
                self._remove(slot)

    def _dispensable(self, idle: list[Slot], size: int, step: int, horizon: int) -> Slot | None:
        complete = self.complete()
        usable = [slot for slot in idle if slot.size >= size]
        for mark, slot in complete:
            if slot in usable and problem(CheckpointHealth.from_json(mark.health)):
                return slot
        for kept in (self.kept, ()):  # if all slots are to be kept, one of them must go
            candidates = {mark.step: (mark, slot) for mark, slot in complete}
            while candidates:
                mark, slot = candidates.pop(dispensable([*candidates, step], horizon))
                if slot in usable and mark.set_id not in kept:
                    return slot
        return None

    def _is_needed(self, slot: Slot) -> bool:
        # For a rollback, even if the slot can no longer be used again.
        mark = slot.mark
        return mark is not None and (mark.set_id in self.kept or slot is self.complete()[-1][1])

    def _remove(self, slot: Slot) -> None:
        slot.remove()
        self._slots.remove(slot)

    def _free_file(self) -> Path | None:  # None for private memory
        if self._directory is None:
            return None
        while (file := self._directory / f"slot-{self._number}").exists():
            self._number += 1
        return file


def _step(slot: Slot) -> int:
    return slot.mark.step if slot.mark is not None else -1


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
