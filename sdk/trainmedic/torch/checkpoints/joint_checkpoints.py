"""Checkpoints that all ranks write and load together in a shared directory.

``training.pt`` or ``sharded/`` is common; ``rank-00003.pt`` is a rank's own.
"""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Mapping, Protocol, Sequence, runtime_checkable

from trainmedic.errors import ConfigurationError, TrainmedicError
from trainmedic.job.group import Group, Ranks
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.checkpoints.checkpoint_files import read_file, write_file
from trainmedic.torch.checkpoints.checkpoint_storage import (
    CheckpointDirectory,
    CheckpointStorage,
    HalfLoaded,
    UnusableCheckpoint,
    read_jointly,
)
from trainmedic.torch.checkpoints.own_checkpoints import OwnCheckpoints
from trainmedic.torch.checkpoints.rank_states import RankState
from trainmedic.torch.checkpoints.replicated_contents import differs_by_rank, unite_files, with_digests_of_restored
from trainmedic.torch.rank_agreement import on_all_ranks
from trainmedic.torch.sources.sample_order import for_other_rank_count
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope


class JointContents(Protocol):
    """Division of a checkpoint into a common part and each rank's own. Every rank calls each method."""

    is_replicated: bool
    """True if each rank has the whole training, except for differences."""

    def capture(self, parts: StateParts, run: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the common part and this rank's own."""
        ...

    def comparable(self, parts: StateParts) -> Mapping[str, Any] | None:
        """Return the states to compare between ranks before `capture`, or None."""
        ...

    def write(self, path: Path, content: Any) -> None: ...

    def prepare(self, path: Path, parts: StateParts, own: Any) -> Any:
        """Check readability and return `read`'s input, on this rank alone. Raises UnusableCheckpoint."""
        ...

    def read(self, path: Path, prepared: Any, parts: StateParts, checked: bool) -> Any:
        """Read into memory, changing nothing. Raises UnusableCheckpoint."""
        ...

    def restore(self, content: Any, parts: StateParts, own: Any) -> None: ...


@runtime_checkable
class BackgroundContents(JointContents, Protocol):
    """Contents that a thread can write from an in-memory copy."""

    def use_separate_group(self) -> None:
        """Write with a separate process group. Every rank calls it."""
        ...

    def divide(self, parts: StateParts, held: Any, run: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return `capture`'s output for an in-memory copy."""
        ...


@runtime_checkable
class UnitedContents(JointContents, Protocol):
    """Contents that another number of ranks can read."""

    def for_other_ranks(self, name: str, files: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return each rank's own part. Raises UnusableCheckpoint."""
        ...


class JointCheckpointDirectory(CheckpointDirectory):
    def __init__(self, directory: str | Path, keep: int | None, ranks: Ranks, contents: JointContents) -> None:
        super().__init__(directory, keep, watches=ranks.rank == 0)
        self._ranks = ranks
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._contents = contents
        # Raises UnusableCheckpoint if another number of ranks cannot continue.
        self.check_rank_count: Callable[[Mapping[str, Any]], None] = lambda run: None
        # Called on rank 0 with the checkpoint to continue from.
        self.on_latest_changed: Callable[[Path], None] = lambda path: None

    def comparable(self, parts: StateParts) -> Mapping[str, Any] | None:
        return self._contents.comparable(parts)

    def allow_background_writes(self) -> None:
        """Allow writing in a thread. Every rank calls it. Raises ConfigurationError."""
        if not isinstance(self._contents, BackgroundContents):
            raise ConfigurationError(f"{type(self._contents).__name__} cannot be written in the background")
        self._contents.use_separate_group()

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        group = self._ranks.group(f"save-{step}")
        path = self._path_of(step)
        unfinished = self.part_directory(group.choose(lambda: self.begin_parts(step)))
        try:
            content, own = on_all_ranks(group, lambda: self._contents.capture(parts, run))
            on_all_ranks(group, lambda: self._write(unfinished, content, {"run": run, "own": own}))
            health = _health_of_all(run.get("health"), group)
            at = group.choose(lambda: self._finish(unfinished, path, step, health=health))
        except BaseException:  # an interrupt must not leave a partial checkpoint either
            if self._rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return SavedCheckpoint(step, envelope.read_time(at), path)

    def _write(self, unfinished: Path, content: Any, own: Any) -> None:
        unfinished.mkdir(parents=True, exist_ok=True)
        self._contents.write(unfinished, content)
        write_file(unfinished / _rank_file(self._rank), own)

    def _finish(self, unfinished: Path, path: Path, step: int, **more: Any) -> str:
        files = {str(file.relative_to(unfinished)): file for file in unfinished.rglob("*") if file.is_file()}
        unseen = [rank for rank in range(self._world_size) if _rank_file(rank) not in files]
        if unseen:
            raise TrainmedicError(
                f"rank 0 does not see in {self._root} what {len(unseen)} of {self._world_size} ranks have written "
                "there: checkpoints need a directory that all ranks share"
            )
        sizes = {name: file.stat().st_size for name, file in files.items()}
        for directory in {file.parent for file in files.values()}:
            checkpoints.flush_directory(directory)
        at = self._publish(unfinished, path, step, sizes, ranks=self._world_size, **more)
        self.on_latest_changed(path)
        return envelope.write_time(at)

    def write_part(self, unfinished: Path, parts: StateParts, held: Any, run: Mapping[str, Any]) -> None:
        assert isinstance(self._contents, BackgroundContents)
        content, own = self._contents.divide(parts, held, run)
        self._write(unfinished, content, {"run": run, "own": own})

    def finish_parts(self, unfinished: Path, step: int, at: datetime, health: Any) -> SavedCheckpoint:
        path = self._path_of(step)
        self._finish(unfinished, path, step, at=envelope.write_time(at), health=health)
        return SavedCheckpoint(step, at, path)

    def load(self, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any]:
        path = checkpoint.path
        group = self._ranks.group(f"load-{path.name}")
        facts = checkpoints.completion(path) or {}
        checked = bool(facts.get("checksums"))

        def prepare() -> tuple[Mapping[str, Any], Any]:
            mine = self._read_own(path, facts.get("ranks"), checked, parts)
            return mine, self._contents.prepare(path, parts, mine["own"])

        def read(prepared: tuple[Mapping[str, Any], Any]) -> Any:
            return self._contents.read(path, prepared[1], parts, checked)

        (mine, _), content = read_jointly(group, path.name, prepare, read)
        self._contents.restore(content, parts, mine["own"])
        run: Mapping[str, Any] = mine["run"]
        return run

    def _read_own(self, path: Path, ranks: Any, checked: bool, parts: StateParts) -> Mapping[str, Any]:
        """Return this rank's file, adapted to the number of ranks. Raises UnusableCheckpoint."""
        if not isinstance(ranks, int) or ranks < 1:
            raise UnusableCheckpoint(f"{path.name} was not written by a job of several ranks")
        if ranks == self._world_size:
            mine: dict[str, Any] = read_file(path / _rank_file(self._rank), checked)
            if not self._contents.is_replicated or self._rank == 0:
                return mine
            first = read_file(path / _rank_file(0), checked)["run"]
            return {**mine, "run": with_digests_of_restored(path.name, mine, first)}
        first = read_file(path / _rank_file(0), checked)
        self.check_rank_count(first["run"])
        # "feed" is the stored name of the batch source's state.
        source = for_other_rank_count(first["run"]["feed"], ranks, self._world_size)
        run = {**first["run"], "feed": source, "random": None, "batches": None, "digests": None}
        files = [
            first,
            *(read_file(path / _rank_file(rank), checked) for rank in range(1, ranks) if differs_by_rank(first)),
        ]
        if isinstance(self._contents, UnitedContents):
            return {"run": run, "own": self._contents.for_other_ranks(path.name, files)}
        if not self._contents.is_replicated:
            return {**first, "run": run}
        own, digests = unite_files(path.name, files, parts)
        return {"run": {**run, "digests": digests}, "own": own}

    def rolled_back_to(self, checkpoint: SavedCheckpoint, reason: Mapping[str, Any]) -> None:
        if self._rank == 0:
            try:
                self.on_latest_changed(checkpoint.path)
            finally:
                super().rolled_back_to(checkpoint, reason)

    def prune(self) -> None:
        if self._rank == 0:
            super().prune()


class JointOwnCheckpoints:
    """The user's own checkpoints in a job of several ranks."""

    def __init__(self, storage: CheckpointStorage, ranks: Ranks) -> None:
        self.directory = storage.directory
        self._storage = storage
        self._ranks = ranks
        self._rank = ranks.rank
        if isinstance(storage, OwnCheckpoints):
            storage.writes_files = ranks.rank == 0

    def checkpoints(self) -> Sequence[SavedCheckpoint]:
        return self._storage.checkpoints()

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        group = self._ranks.group(f"save-{step}")
        with_health = {**run, "health": _health_of_all(run.get("health"), group)}
        return on_all_ranks(group, lambda: self._storage.save(step, parts, with_health))

    def load(self, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any] | None:
        try:
            run_state = self._storage.load(checkpoint, parts)
        except UnusableCheckpoint as error:  # other ranks may have loaded it, so no older one can be tried
            raise HalfLoaded(str(error)) from error
        state = RankState.from_plain((run_state or {}).get("rank_state"))
        if state is not None and state.rank != self._rank and state.parts:
            # Without differing parts, any rank's state is this one's.
            raise HalfLoaded(
                f"rank {self._rank} was given the state of rank {state.rank}, but {', '.join(state.parts)} differs by "
                "rank: let save and load keep it on each rank"
            )
        return run_state

    def rolled_back_to(self, checkpoint: SavedCheckpoint, reason: Mapping[str, Any]) -> None:
        if self._rank == 0:
            self._storage.rolled_back_to(checkpoint, reason)

    def prune(self) -> None:
        if self._rank == 0:
            self._storage.prune()


def _health_of_all(own: Any, group: Group) -> Any:
    """Return this rank's health, not finite if any rank's is not."""
    if not isinstance(own, dict):
        return None
    finite = [report for report in group.poll(own.get("finite")).values() if report is not None]
    return {**own, "finite": all(finite)} if finite else own


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"
