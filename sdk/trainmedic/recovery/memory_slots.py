"""Slots in host memory, one per in-memory checkpoint, which can outlive the process.

Each is a mapped file in ``/dev/shm``, or anonymous memory of this process. A file's mark is written last and removed
first. Only this user has access.

::

    /dev/shm/trainmedic-1000/<training>/<node>/rank-00003/slot-0, slot-0.json
    /dev/shm/trainmedic-1000/<training>/<node>/replica-00007/...        of a rank on another node
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import shutil
import stat
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping
from urllib.parse import quote

from trainmedic.errors import TrainmedicError

try:
    import fcntl
except ImportError:  # Windows has no shared memory of this kind
    fcntl = None  # type: ignore[assignment]

ENVIRONMENT = "TRAINMEDIC_SHARED_MEMORY"  # variable that replaces ``/dev/shm``
STALE_AFTER = 3600.0  # seconds without a change, until an ended training's memory is removed
_DEFAULT_BASE = "/dev/shm"  # noqa: S108 - its subdirectory is accessible to this user only
_LARGEST_MARK = 1 << 20  # bytes
_CHUNK = 1 << 26  # bytes of a checksum between two possible interrupts
_VERSION = 1
_LOCK = "lock"  # file
_LONGEST_NAME = 200  # characters before a hash; file systems take 255 bytes
_HELD_LOCKS: set[tuple[int, str]] = set()  # process ID and path, because a fork copies the set


class UntrustedMemory(TrainmedicError):
    """Shared memory is open to other users, or not as written."""


@dataclass(frozen=True)
class SlotMark:
    set_id: str  # ID of the checkpoint, common to all ranks
    step: int
    at: str  # time in the envelope's format
    rank: int
    ranks: int  # of the job
    size: int  # bytes in use
    structure: int  # offset of the pickled structure, which follows the tensors
    checksum: int  # CRC-32 of the bytes in use
    health: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, fields: Any) -> SlotMark:
        try:
            numbers = {name: fields[name] for name in ("step", "rank", "ranks", "size", "structure", "checksum")}
            if fields["v"] != _VERSION or not all(type(value) is int and value >= 0 for value in numbers.values()):
                raise ValueError("its members are not whole numbers")
            if numbers["structure"] > numbers["size"]:
                raise ValueError("it contradicts itself")
            health = fields["health"] if isinstance(fields.get("health"), dict) else None
            return cls(set_id=str(fields["set_id"]), at=str(fields["at"]), health=health, **numbers)
        except (TypeError, KeyError, ValueError) as error:
            raise UntrustedMemory(f"a mark of a checkpoint in memory cannot be read: {error}") from error

    def text(self) -> str:
        return json.dumps({"v": _VERSION, **asdict(self)})


class Slot:
    """Memory of ``size`` bytes: existing, in a new file, or anonymous. Raises OSError."""

    def __init__(self, size: int, file: Path | None, existing: mmap.mmap | None = None) -> None:
        self.size = size
        self.file = file
        self.mark: SlotMark | None = None  # None without a complete checkpoint
        self.users = 0  # readers and writers, which prevent reuse
        self.cached_views: Any = None  # set by the user of the memory
        if existing is not None:
            self.memory = existing
            return
        if file is None:
            self.memory = mmap.mmap(-1, size)
        else:
            descriptor = _create(file)
            try:
                # Allocate first: writing to memory that cannot be allocated would kill the process.
                os.posix_fallocate(descriptor, 0, size)
                self.memory = mmap.mmap(descriptor, size)
            except BaseException:  # an interrupt must not leave a file either
                file.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        # Touch the pages now, so that a copy in training does not wait for them. The call releases the GIL.
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), 0, size)

    @classmethod
    def of_file(cls, file: Path, mark: SlotMark) -> Slot:
        """Open an existing slot. Raises OSError and UntrustedMemory."""
        memory = map_file(file, mark, is_writable=True)
        slot = cls(len(memory), file, memory)
        slot.mark = mark
        return slot

    def complete(self, mark: SlotMark) -> None:
        """Mark the content as complete. Raises OSError if others cannot see it."""
        self.mark = mark
        if self.file is not None:
            write_mark(self.file, mark)

    def clear(self) -> None:
        self.mark = None
        if self.file is not None:
            with contextlib.suppress(OSError):
                _mark_of(self.file).unlink(missing_ok=True)

    def remove(self) -> None:
        self.clear()
        self.cached_views = None
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)

    def checksum(self, size: int) -> int:
        return checksum(memoryview(self.memory)[:size])


def checksum(data: memoryview) -> int:
    """Return the CRC-32, without the GIL."""
    value = 0
    for begin in range(0, len(data), _CHUNK):
        value = zlib.crc32(data[begin : begin + _CHUNK], value)
    return value


def node_directory(training: str, node: str) -> Path:
    """Create a training's directory on this node; remove ended trainings'. Raises OSError and UntrustedMemory."""
    if fcntl is None or not hasattr(os, "posix_fallocate"):
        raise UntrustedMemory("this system has no shared memory that outlives a process")
    root = Path(os.environ.get(ENVIRONMENT) or _DEFAULT_BASE) / f"trainmedic-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UntrustedMemory(f"{root} is not a private directory of this user: remove it, or set {ENVIRONMENT}")
    remove_stale(root, keep=training)
    # No other user can enter the directories below.
    directory = root / _file_name(training) / _file_name(node)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def rank_directory(node: Path, rank: int) -> Path:
    return node / f"rank-{rank:05d}"


def replica_directory(node: Path, rank: int) -> Path:
    return node / f"replica-{rank:05d}"


class DirectoryLock:
    """Exclusive use of a directory. Raises UntrustedMemory after ``patience`` seconds.

    Not inherited by forks: data loader workers outlive a killed process.
    """

    def __init__(self, directory: Path, patience: float = 5.0) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.directory = directory
        self._holder = (os.getpid(), str(directory / _LOCK))
        if self._holder in _HELD_LOCKS:
            raise UntrustedMemory(f"{directory} is held by another run of this process, which was not closed")
        self._descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + patience
        while not _try_lock(self._descriptor):
            if time.monotonic() > until:
                os.close(self._descriptor)
                raise UntrustedMemory(f"{directory} is held by another process of the same training")
            time.sleep(0.05)
        _HELD_LOCKS.add(self._holder)

    def release(self) -> None:
        _HELD_LOCKS.discard(self._holder)
        os.close(self._descriptor)


def surviving(node: Path) -> Iterator[tuple[Path, SlotMark]]:
    """Yield complete slots; skip untrusted files."""
    for mark_file in sorted(node.glob("*/slot-*.json")):
        file = mark_file.with_suffix("")
        try:
            mark = SlotMark.read(json.loads(_contents(mark_file, _LARGEST_MARK)))
            if mark.size > _require_private(file.lstat()).st_size:
                continue
        except (OSError, ValueError, RecursionError, UntrustedMemory):
            continue
        yield file, mark


def map_file(file: Path, mark: SlotMark, is_writable: bool = False) -> mmap.mmap:
    """Map a slot's file. Raises OSError and UntrustedMemory."""
    descriptor = os.open(file, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = _require_private(os.fstat(descriptor)).st_size
        if size < mark.size:
            raise UntrustedMemory(f"{file} is truncated")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0))
    finally:
        os.close(descriptor)


def write_mark(file: Path, mark: SlotMark) -> None:
    """Raises OSError."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    descriptor = _create(unfinished)
    with os.fdopen(descriptor, "w") as target:
        target.write(mark.text())
    unfinished.replace(_mark_of(file))


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: other ranks or nodes have directories there
        directory.parent.rmdir()
        directory.parent.parent.rmdir()


def remove_stale(root: Path, keep: str, older_than: float = STALE_AFTER) -> None:
    """Remove the memory of trainings unchanged for ``older_than`` seconds without a live process."""
    for training in root.iterdir():
        if training.name == _file_name(keep) or training.is_symlink() or not training.is_dir():
            continue
        try:
            changed = max(path.lstat().st_mtime for path in (training, *training.rglob("*")))
        except OSError:  # it is being removed or written
            continue
        if time.time() - changed > older_than and not _is_locked(training):
            shutil.rmtree(training, ignore_errors=True)


def _is_locked(training: Path) -> bool:
    for file in training.glob(f"*/*/{_LOCK}"):
        if (os.getpid(), str(file)) in _HELD_LOCKS:  # opening and closing it would release the lock
            return True
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # unknown
            return True
        try:
            if not _try_lock(descriptor):
                return True
        finally:
            os.close(descriptor)
    return False


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # both mean that another process holds the lock
        return False
    return True


def _create(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _contents(file: Path, most_bytes: int) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as source:
        _require_private(os.fstat(source.fileno()))
        return source.read(most_bytes)


def _require_private(status: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UntrustedMemory("a file in shared memory is not a private file of this user")
    return status


def _mark_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


def _file_name(name: str) -> str:
    quoted = quote(name, safe="") or "-"
    if len(quoted) > _LONGEST_NAME:
        quoted = f"{quoted[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return quoted if quoted.strip(".") else quoted.replace(".", "%2E")
