"""Checkpoints written in the background; training waits only for the in-memory copy.

Code that changes checkpoints calls `BackgroundSaves.settle` first.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Mapping, Protocol

from trainmedic.client import Medic
from trainmedic.errors import NotAgreed, TrainmedicError, is_explained
from trainmedic.job.group import ranks_named
from trainmedic.recovery.background import BackgroundThread
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.memory_slots import Slot, SlotMark
from trainmedic.torch.memory.memory_checkpoints import MemoryCheckpoints
from trainmedic.torch.rank_agreement import first_line
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

PATIENCE = 120.0  # seconds that `BackgroundSaves.settle` waits for a write
_LONGEST_WAIT = 1800.0  # seconds, of rank 0 for the other ranks' parts
_POLL_INTERVAL = 0.2  # seconds between two checks for the other ranks' parts
# Files in the unfinished checkpoint by which ranks report, with the rank's number.
_WRITTEN, _FAILED = "written-", "failed-"
# A rank's reasons not to start.
_WRITING, _NO_MEMORY, _NO_COPY = "writing", "no memory", "no copy"


class PartWriter(Protocol):
    def begin_parts(self, step: int) -> str:
        """Create a directory on rank 0 and return its name."""
        ...

    def part_directory(self, name: str) -> Path: ...

    def write_part(self, unfinished: Path, parts: StateParts, held: Any, run: Mapping[str, Any]) -> None:
        """Write this rank's part from the copy ``held``."""
        ...

    def finish_parts(self, unfinished: Path, step: int, at: datetime, health: Any) -> SavedCheckpoint:
        """Rename the checkpoint and mark it complete, on rank 0."""
        ...

    def prune(self) -> None: ...


# ``torch.distributed.checkpoint.async_save`` would copy the state again.
class BackgroundSaves:
    """Writer of periodic checkpoints, whose thread reports them."""

    def __init__(self, medic: Medic, disk: PartWriter, memory: MemoryCheckpoints) -> None:
        self._medic = medic
        self._job, self._rank, self._world_size = medic.job, medic.rank, medic.world_size
        self._disk = disk
        self._memory = memory
        self._thread = BackgroundThread("trainmedic-checkpoint")
        # Held while a checkpoint is completed or given up.
        self._completing = threading.Lock()
        self._is_given_up = False
        self.has_saved = False  # True after the first complete checkpoint

    def start(self, step: int, parts: StateParts, copy: Callable[[], Slot | None]) -> bool:
        """Copy the state and start writing, unless another write is running.

        Every rank calls it. Returns False if the caller must write instead: a rank lacks memory and none is writing.
        Raises NotAgreed and errors of ``copy``.
        """
        group = self._medic.group(f"save-{step}")
        slot: Slot | None = None
        fault: Exception | None = None
        obstacle = _WRITING
        if self._thread.is_idle:
            try:
                slot = copy()
                obstacle = _NO_MEMORY if slot is None else ""
            except Exception as error:  # any error of a state_dict; the other ranks wait for this report
                fault, obstacle = error, _NO_COPY
        try:
            obstacles = group.poll(obstacle)
            if len(obstacles) < group.world_size:
                missing = [rank for rank in range(group.world_size) if rank not in obstacles]
                own = f"; rank {group.rank}: {first_line(fault)}" if fault is not None else ""
                raise NotAgreed(f"{ranks_named(missing)} did not begin to write the checkpoint{own}") from fault
            if _WRITING in obstacles.values():
                log.warning("%s: no checkpoint of step %d: the one before is still being written", self._job, step)
            elif without_copy := [rank for rank, each in obstacles.items() if each == _NO_COPY]:
                raise fault or NotAgreed(f"{ranks_named(without_copy)} could not copy the state")
            elif _NO_MEMORY not in obstacles.values() and slot is not None:
                unfinished = self._disk.part_directory(group.choose(lambda: self._disk.begin_parts(step)))
                self._is_given_up = False
                taken, slot = slot, None
                self._thread.submit(lambda: self._write(unfinished, step, parts, taken))
        finally:
            if slot is not None and self._memory.pool is not None:
                self._memory.pool.release(slot)
        if fault is not None:
            raise fault
        return _NO_MEMORY not in obstacles.values() or _WRITING in obstacles.values()

    def settle(self) -> None:
        """Wait for the write; give it up after `PATIENCE`."""
        if not self._thread.settle(PATIENCE):
            log.error("%s: giving up a checkpoint that is not written after %.0f s", self._job, PATIENCE)
            with self._completing:
                self._is_given_up = True

    def close(self) -> None:
        self.settle()
        self._thread.close(1.0)

    def _write(self, unfinished: Path, step: int, parts: StateParts, slot: Slot) -> None:
        began = time.monotonic()
        try:
            mark = self._memory.wait_until_complete(slot, step)
            state = self._memory.views(slot, mark, parts)
            self._disk.write_part(unfinished, parts, state["training"], state["run"])
            (unfinished / f"{_WRITTEN}{self._rank:05d}").touch()
            if self._rank == 0:
                self._complete(unfinished, step, mark)
                log.info("%s: wrote the checkpoint of step %d in %.1f s", self._job, step, time.monotonic() - began)
        except Exception as error:  # any error of the disk or a state costs only this checkpoint
            message = "%s: no checkpoint of step %d: %s"
            log.error(message, self._job, step, first_line(error), exc_info=not is_explained(error))
            self._medic.save_failed(step, first_line(error))
            self._report_failure(unfinished, error)
        finally:
            if self._memory.pool is not None:
                self._memory.pool.release(slot)

    def _complete(self, unfinished: Path, step: int, mark: SlotMark) -> None:
        """Publish the checkpoint once all parts are written, on rank 0."""
        until = time.monotonic() + _LONGEST_WAIT
        while len(written := list(unfinished.glob(f"{_WRITTEN}*"))) < self._world_size:
            for failed in unfinished.glob(f"{_FAILED}*"):
                raise TrainmedicError(failed.read_text(errors="replace") or "it failed on another rank")
            if time.monotonic() > until or self._is_given_up:
                raise TrainmedicError(f"{self._world_size - len(written)} of {self._world_size} ranks wrote no part")
            time.sleep(_POLL_INTERVAL)
        for file in written:
            file.unlink()
        with self._completing:
            if self._is_given_up:
                raise TrainmedicError("the checkpoint was given up")
            checkpoint = self._disk.finish_parts(unfinished, step, envelope.read_time(mark.at), mark.health)
        self.has_saved = True
        self._medic.saved(checkpoint.step)
        with suppress(OSError):
            self._disk.prune()

    def _report_failure(self, unfinished: Path, error: Exception) -> None:
        with suppress(OSError):
            if self._rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            else:
                (unfinished / f"{_FAILED}{self._rank:05d}").write_text(f"rank {self._rank}: {first_line(error)}")
