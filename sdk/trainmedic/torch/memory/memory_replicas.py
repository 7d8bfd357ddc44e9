"""Copies of other nodes' in-memory checkpoints, and a server for this rank's own.

A rank copies its wards' checkpoints. All ranks copy the same steps.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping

from trainmedic.errors import TrainmedicError
from trainmedic.recovery import memory_slots, replicas
from trainmedic.recovery.memory_slots import Slot, SlotMark
from trainmedic.recovery.replicas import Address, Found, ReplicaServer
from trainmedic.torch.memory.memory_checkpoints import Course, MemoryCheckpoints

log = logging.getLogger("trainmedic")

COPIES = 2  # one is complete while the other is fetched
_FAILURES = 5  # consecutive, until a warning is logged
_PERIOD = 1.0  # seconds between two checks


class MemoryReplicas:
    """Copies in ``node``, this node's directory."""

    def __init__(self, memory: MemoryCheckpoints, rank: int, node: Path, secret: bytes) -> None:
        self._memory = memory
        self._rank = rank
        self._node = node
        self._secret = secret
        self._slots: dict[int, list[Slot]] = {}  # copies by ward
        self._wards: dict[int, Address] = {}  # ranks of another node whose checkpoints this rank copies
        self._dropped = (Course(""), 0, 0)  # the last drop: course, step, until
        self._lock = threading.Lock()  # held while copies become complete or are dropped
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._server = ReplicaServer(secret, self._find)

    @property
    def address(self) -> Address:
        return self._server.address

    def fetch(self, address: Address, mark: SlotMark, slot: Slot) -> SlotMark | None:
        """Fetch an earlier process's checkpoint; None if it is gone. Raises TrainmedicError and OSError."""
        request = {"set_id": mark.set_id, "rank": mark.rank}

        def memory_for(fetched: SlotMark) -> memoryview:
            if fetched.size > slot.size:
                raise replicas.NotFetched("it has grown")
            return memoryview(slot.memory)

        return replicas.fetch(address, self._secret, request, memory_for)

    def start_copying(self, wards: Mapping[int, Address]) -> None:
        self._wards = dict(wards)
        self._slots = {ward: [] for ward in self._wards}  # complete, because another thread iterates over it
        if self._wards:
            self._thread = threading.Thread(target=self._run, name="trainmedic-replicator", daemon=True)
            self._thread.start()

    def end(self, in_order: bool) -> None:
        """Stop; ``in_order`` deletes the copies."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_PERIOD + replicas.TIMEOUT)
        self._server.close()
        if in_order:
            for ward in self._wards:
                memory_slots.remove_directory(memory_slots.replica_directory(self._node, ward))

    def drop_after(self, step: int, until: int) -> None:
        with self._lock:
            self._dropped = (self._memory.course, step, until)
            for slot in [slot for slots in self._slots.values() for slot in slots]:
                mark = slot.mark  # read once: the copying thread may clear it
                if mark is not None and mark.step > step:
                    slot.clear()

    def _run(self) -> None:
        failures: dict[int, int] = {}
        while not self._ended.wait(_PERIOD):
            for ward, address in self._wards.items():
                if self._ended.is_set():
                    return
                try:
                    self._update(ward, address)
                    failures[ward] = 0
                except (OSError, TrainmedicError) as error:
                    failures[ward] = failures.get(ward, 0) + 1
                    if failures[ward] == _FAILURES:  # a first failure may only mean that the other rank has ended
                        log.warning("no copies of the checkpoints of rank %d: %s", ward, error)

    def _update(self, ward: int, address: Address) -> None:
        """Copy a ward's newest checkpoint if it is new."""
        slots = self._slots[ward]
        # Read each mark once, here and below: another thread may clear it.
        marks = [mark for slot in slots if (mark := slot.mark) is not None]
        newest = max(marks, default=None, key=lambda mark: mark.at)
        slot: Slot | None = None

        def memory_for(mark: SlotMark) -> memoryview:
            nonlocal slot
            slot = self._free_slot(ward, slots, mark.size)
            return memoryview(slot.memory)

        began = time.monotonic()
        known = None if newest is None else newest.set_id
        request = {"rank": ward, "other_than": known, "multiple_of": self._memory.cadence.replica_steps}
        mark = replicas.fetch(address, self._secret, request, memory_for)
        if mark is None or slot is None:
            return
        if slot.checksum(mark.size) != mark.checksum:
            raise replicas.NotFetched("it is damaged")
        with self._lock:
            # A rollback or drop invalidates the copy; the ward may drop its own later.
            course, (of, after, until) = self._memory.course, self._dropped
            if mark.set_id == course.set_id(mark.step) and not (course == of and after < mark.step <= until):
                slot.complete(mark)
        self._memory.pace.replica_seconds = time.monotonic() - began

    def _free_slot(self, ward: int, slots: list[Slot], size: int) -> Slot:
        directory = memory_slots.replica_directory(self._node, ward)
        directory.mkdir(mode=0o700, exist_ok=True)
        if len(slots) < COPIES:
            slots.append(Slot(size, directory / f"slot-{len(slots)}"))
            return slots[-1]
        # Without sorting: other threads would see an empty list meanwhile.
        place = min(range(len(slots)), key=lambda index: _time_of(slots[index]))
        older = slots[place]
        older.clear()
        if older.size < size:
            older.remove()
            slots[place] = older = Slot(size, older.file)
        return older

    @contextmanager
    def _find(self, request: Mapping[str, Any]) -> Iterator[Found | None]:
        """Find a named checkpoint on this node, or this rank's newest to copy."""
        # In a thread of the server, one per connection.
        set_id = request.get("set_id")
        if set_id is not None:
            with self._in_files(str(set_id), request["rank"]) as found:
                yield found
            return
        pool, newest = self._memory.pool, self._newest_to_copy(request)
        if pool is None or newest is None:
            yield None
            return
        with pool.using(newest) as slot:
            mark = slot.mark
            yield None if mark is None else (mark, memoryview(slot.memory))

    def _newest_to_copy(self, request: Mapping[str, Any]) -> Slot | None:
        pool, every = self._memory.pool, request["multiple_of"]
        if pool is None or request["rank"] != self._rank or type(every) is not int or every == 0:
            return None
        copied = [(mark, slot) for mark, slot in pool.complete() if mark.step % every == 0]
        if not copied or copied[-1][0].set_id == request["other_than"]:
            return None
        return copied[-1][1]

    @contextmanager
    def _in_files(self, set_id: str, rank: Any) -> Iterator[Found | None]:
        for file, mark in memory_slots.surviving(self._node):
            if mark.set_id == set_id and mark.rank == rank:
                yield mark, memoryview(memory_slots.map_file(file, mark))
                return
        yield None


def _time_of(slot: Slot) -> str:
    mark = slot.mark
    return "" if mark is None else mark.at
