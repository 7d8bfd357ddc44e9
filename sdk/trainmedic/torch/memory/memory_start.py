"""Start of in-memory checkpoints, with those that an earlier process left."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import socket
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Literal, Mapping, Sequence

from trainmedic.errors import ConfigurationError, NotAgreed, TrainmedicError
from trainmedic.job.group import Group
from trainmedic.job.process_usage import host_memory
from trainmedic.recovery import memory_slots, replicas
from trainmedic.recovery.checkpoints import write_durably
from trainmedic.recovery.memory_pool import SlotPool
from trainmedic.recovery.memory_slots import DirectoryLock, Slot, SlotMark
from trainmedic.recovery.replicas import Address
from trainmedic.torch.memory.memory_checkpoints import COPIED, Course, MemoryCheckpoints
from trainmedic.torch.memory.memory_replicas import MemoryReplicas

log = logging.getLogger("trainmedic")

FILE = ".trainmedic-memory.json"  # file in the checkpoint directory with the training's name in shared memory
_UNKNOWN_LIMIT = 1 << 30  # bytes of a node that are assumed to be available if the number is unknown
_SHARE = 0.5  # of the node's memory available at the start


@dataclass(frozen=True)
class Memory:
    """Options of in-memory checkpoints for `trainmedic.torch.attach`. Raises ConfigurationError."""

    every: int | Literal["auto"] = "auto"
    """Steps between checkpoints, raised to respect ``share``. ``"auto"``: as few as it allows."""
    keep: int = 4
    """Number kept, at distances that grow with age; one more slot is written to."""
    limit: int | None = None
    """Bytes per rank. None: its part of half the available memory."""
    share: float | None = None
    """Share of a step that training may wait. None: 0.8 % for 10 ms, falling to 0.15 % from 100 ms on."""

    asynchronous: bool = False  # True writes ``checkpoint_every``'s checkpoints in the background
    replica_every: float | None = None  # seconds between copies to another node. None: no copies.

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("keep", self.keep), ("limit", self.limit)):
            if (name, value) not in (("every", "auto"), ("limit", None)) and (type(value) is not int or value < 1):
                raise ConfigurationError(f"memory: {name} is {value!r}; it is a whole number of 1 or more")
        if self.share is not None and not self.share > 0:
            raise ConfigurationError(f"memory: share is {self.share!r}; it is a share of a step's time, such as 0.01")
        if self.replica_every is not None and not (self.replica_every > 0 and self.keep > COPIED):
            raise ConfigurationError(
                f"memory: replica_every is {self.replica_every!r}, with keep={self.keep}; it is a number of seconds, "
                f"and needs a keep of {COPIED + 1} or more"
            )


@dataclass(frozen=True)
class Remnant:
    """One rank's part of a checkpoint, left by an earlier process."""

    node: str  # which has the file
    file: str  # path there
    mark: SlotMark

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, "file": self.file, "mark": json.loads(self.mark.text())}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Remnant:
        return cls(fields["node"], fields["file"], SlotMark.read(fields["mark"]))


class MemoryStart:
    def __init__(self, memory: MemoryCheckpoints, options: Memory, job: str, directory: Path | None) -> None:
        self.memory = memory
        self._options = options
        self._job = job
        self._node = os.environ.get("TRAINMEDIC_NODE") or socket.gethostname()
        self._file = directory / FILE if directory is not None else None
        self._lock: DirectoryLock | None = None
        self._replicas: MemoryReplicas | None = None

    def begin(self, group: Group, newest_step: Callable[[], int] | None) -> None:
        """Reserve memory and restore what an earlier process left. Raises NotAgreed and OSError.

        ``newest_step`` returns the newest on disk; only later ones are fetched from other nodes. None restores nothing.
        """
        # Release what an earlier call that failed has acquired.
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._replicas is not None:
            self._replicas.end(in_order=False)
            self._replicas = None
        names = group.choose(lambda: self._names(newest_step))
        directory = self._open(names["training"], group.rank)
        self._serve(directory, group.rank, bytes.fromhex(names["secret"]))
        nodes, addresses = self._nodes(group)
        neighbours = [rank for rank, node in nodes.items() if node == self._node]  # including this rank
        remnants = self._remnants(group, directory, group.rank == min(neighbours))
        limit = self._limit(len(neighbours), directory)
        # One more is written to; a background write holds another one until it is on disk.
        wanted = self._options.keep + (2 if self._options.asynchronous else 1)
        pool = SlotPool(wanted, limit, self._lock.directory if self._lock is not None else None)
        if newest_step is not None:
            by_node = {nodes[rank]: address for rank, address in reversed(addresses.items())}
            for number, parts in enumerate(complete_sets(remnants, group.world_size)):
                # Of other nodes' parts, fetch the newest checkpoint's, if it is newer than the disk's.
                is_needed = number == 0 and parts[0].mark.step > names["newest"]
                self._restore(parts[group.rank], pool, by_node if is_needed else {})
        self._remove_unused(group, directory, pool, neighbours)
        self.memory.begin(Course(names["course"]), pool, self._replicas)
        if self._replicas is not None:
            wards = replicas.wards_of(nodes, group.rank)  # ranks of another node; this rank keeps copies of theirs
            self._replicas.start_copying({rank: addresses[rank] for rank in wards if rank in addresses})

    def end(self, in_order: bool) -> None:
        """Stop; ``in_order`` frees the memory."""
        self.memory.close()
        if self._replicas is not None:
            self._replicas.end(in_order)
        if self.memory.pool is not None and in_order:
            self.memory.pool.clear()
        if self._lock is not None:
            if in_order:
                memory_slots.remove_directory(self._lock.directory)
            self._lock.release()
            self._lock = None

    def _names(self, newest_step: Callable[[], int] | None) -> dict[str, Any]:
        newest = newest_step() if newest_step is not None else 0
        names = {"course": secrets.token_hex(4), "secret": secrets.token_hex(32)}  # new at each start
        return {"training": self._training_name(), "newest": newest, **names}

    def _training_name(self) -> str | None:
        """Return the training's name in shared memory; None without a writable checkpoint directory."""
        if self._file is None:
            return None
        try:
            name = json.loads(self._file.read_bytes())["training"]
            if isinstance(name, str):
                return self._name_here(name)
        except (OSError, ValueError, LookupError, TypeError):
            pass
        name = secrets.token_hex(8)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._file, json.dumps({"training": name}).encode())
        except OSError as error:
            log.warning("%s: in-memory checkpoints end with the process: %s", self._job, error)
            return None
        return self._name_here(name)

    def _name_here(self, name: str) -> str:
        # With the path's checksum, because a copied directory is another training.
        assert self._file is not None
        return f"{self._job}-{name}-{zlib.crc32(os.fsencode(self._file.resolve())):08x}"

    def _nodes(self, group: Group) -> tuple[dict[int, str], dict[int, Address]]:
        address = self._replicas.address if self._replicas is not None else None
        members = group.poll({"node": self._node, "address": address})
        if len(members) < group.world_size:
            raise NotAgreed("not all ranks have started in-memory checkpoints")
        nodes = {rank: str(members[rank]["node"]) for rank in sorted(members)}
        addresses = {rank: members[rank]["address"] for rank in sorted(members) if members[rank]["address"]}
        return nodes, {rank: (str(host), int(port)) for rank, (host, port) in addresses.items()}

    def _serve(self, directory: Path | None, rank: int, secret: bytes) -> None:
        if self._options.replica_every is None:
            return
        if directory is None:
            log.warning("%s: no copies on other nodes: there is no shared memory for them", self._job)
            return
        try:
            self._replicas = MemoryReplicas(self.memory, rank, directory, secret)
        except OSError as error:
            log.warning("%s: no copies on other nodes: no port is available: %s", self._job, error)

    def _remnants(self, group: Group, directory: Path | None, reports: bool) -> list[Remnant]:
        mine: list[dict[str, Any]] = []
        if directory is not None and reports:
            mine = [Remnant(self._node, str(file), mark).to_json() for file, mark in memory_slots.surviving(directory)]
        return [Remnant.from_json(fields) for listed in group.poll(mine).values() for fields in listed]

    def _open(self, training: str | None, rank: int) -> Path | None:
        """Lock this rank's directory; return the node's. None: memory ends with the process."""
        if training is None:
            return None
        try:
            directory = memory_slots.node_directory(training, self._node)
            self._lock = DirectoryLock(memory_slots.rank_directory(directory, rank))
        except (OSError, TrainmedicError) as error:
            log.warning("%s: in-memory checkpoints end with the process: %s", self._job, error)
            return None
        return directory

    def _limit(self, neighbours: int, directory: Path | None) -> int:
        """Return this rank's bytes."""
        if self._options.limit is not None:
            return self._options.limit
        memory = host_memory()
        available = memory[1] - memory[0] if memory is not None else _UNKNOWN_LIMIT
        if directory is not None:
            held = sum(file.lstat().st_size for file in directory.glob("*/slot-*"))
            status = os.statvfs(directory)
            available = min(available, status.f_bavail * status.f_frsize) + held
        return int(available * _SHARE) // neighbours

    def _restore(self, remnant: Remnant, pool: SlotPool, addresses: Mapping[str, Address]) -> None:
        """Restore a part in place, by a copy, or from another node."""
        try:
            file = Path(remnant.file)
            if remnant.node != self._node:
                if remnant.node in addresses and self._replicas is not None:
                    self._fetch(addresses[remnant.node], remnant.mark, pool, self._replicas)
                return
            if self._lock is not None and file.parent == self._lock.directory:
                pool.add(Slot.of_file(file, remnant.mark))
            else:
                self._copy(memory_slots.map_file(file, remnant.mark), remnant.mark, pool)
        except (OSError, TrainmedicError) as error:
            log.warning("%s: cannot restore %s: %s", self._job, remnant.mark.set_id, error)

    def _copy(self, source: Any, mark: SlotMark, pool: SlotPool) -> None:
        slot = pool.make(mark.size)
        slot.memory[: mark.size] = memoryview(source)[: mark.size]  # a slice of the map itself would be a copy
        slot.complete(mark)

    def _fetch(self, address: Address, mark: SlotMark, pool: SlotPool, source: MemoryReplicas) -> None:
        slot = pool.make(mark.size)
        fetched = source.fetch(address, mark, slot)
        if fetched is not None:
            slot.complete(fetched)

    def _remove_unused(self, group: Group, directory: Path | None, pool: SlotPool, neighbours: Sequence[int]) -> None:
        group.poll()  # all ranks have read what they need
        if directory is None:
            return
        if self._lock is not None:
            kept = {slot.file.name for _, slot in pool.complete() if slot.file is not None}
            for file in self._lock.directory.glob("slot-*"):
                if file.name.partition(".")[0] not in kept:
                    file.unlink(missing_ok=True)
        if group.rank == min(neighbours):
            own = {memory_slots.rank_directory(directory, rank) for rank in neighbours}
            for other in set(directory.iterdir()) - own:
                shutil.rmtree(other, ignore_errors=True)


def complete_sets(remnants: Iterable[Remnant], ranks: int) -> list[dict[int, Remnant]]:
    """Return checkpoints of which all parts survive, newest first."""
    sets: dict[str, dict[int, Remnant]] = {}
    for remnant in remnants:
        mark = remnant.mark
        if mark.ranks == ranks:
            sets.setdefault(mark.set_id, {}).setdefault(mark.rank, remnant)
    whole = [parts for parts in sets.values() if len(parts) == ranks and 0 in parts]
    return sorted(whole, key=lambda parts: (parts[0].mark.at, parts[0].mark.step), reverse=True)
