"""Classification of a folder's files: kind, node, rank and attempt.

Known: our layout, torchrun's ``--log-dir``, and names such as ``rank3.log``, ``dmesg-node7.txt``, ``slurm-123.out``.
"""

from __future__ import annotations

import codecs
import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path, PurePath
from typing import IO

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic.wire import log_layout
from trainmedic_logs.domain import file_times
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES
from trainmedic_logs.files import dump_reader
from trainmedic_logs.files.reading_limits import LimitReached, ReadingLimits

MOST_FILES = 20_000
MOST_BYTES = 64 * 1024 * 1024
"""Longer files are read at their end."""
MOST_UNPACKED = 1024 * 1024 * 1024
"""Larger ones are skipped as possible bombs."""
_GZIP = b"\x1f\x8b"
# Errors for a gzip file that is truncated, damaged, or followed by other bytes.
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
# Highest compression ratio of Deflate.
_LARGEST_RATIO = 1032
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_HEAD = 4096  # bytes by which a file is classified
_CHECKED_EVERY = 64 * 1024  # bytes read between two checks of the limits
# Entries per directory, and pending directories.
_MOST_ENTRIES = 200_000
_ZEROS = re.compile(rb"\0+")
_MOST_ZERO_RUNS = 8
_CONTROL_BYTES = re.compile(rb"[\1-\6\x0e-\x1a\x1c-\x1f]")


class Kind(StrEnum):
    LINES = "lines"
    DUMP = "dump"
    """PyTorch flight recorder."""
    ERROR = "error"
    """Exception written by torch's ``@record``."""
    SOURCES = "sources"
    """Rank, node, process and GPUs, recorded by the SDK."""
    ATTEMPTS = "attempts"
    """Failed attempts, recorded by ``trainmedic-run``."""
    ENDED = "ended"
    """Exit code 0, recorded by ``trainmedic-run``."""


class FolderFile(Struct, frozen=True):
    path: Path
    kind: Kind
    origin: Origin
    written: datetime
    """Last modification, UTC."""


class Folder(Struct, frozen=True):
    files: tuple[FolderFile, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    """Reasons by unread file, or ``the rest``."""


def classify_files(directory: Path, limits: ReadingLimits | None = None) -> Folder:
    """Classify files in and below `directory`, without following links. Raises OSError if it cannot be listed."""
    limits = limits or ReadingLimits()
    files: list[FolderFile] = []
    left_out: dict[str, str] = {}
    for path in _paths(directory, limits, left_out):
        name = str(path.relative_to(directory))
        if len(files) + len(left_out) >= MOST_FILES:
            left_out["the rest"] = f"more than {MOST_FILES:,} files"
            break
        try:
            limits.check()
            if found := _classified(path, directory):
                files.append(found)
            else:
                left_out[name] = "it is not text in UTF-8, or in UTF-16 with a byte order mark"
        except LimitReached as reached:
            left_out["the rest"] = str(reached.strerror)
            break
        except OSError as error:
            left_out[name] = error.strerror or str(error)
    return Folder(tuple(_with_ranks(files)), left_out)


def lines_of(file: FolderFile, limits: ReadingLimits | None = None) -> Iterator[bytes]:
    """Yield a file's last `MOST_BYTES` as lines. Raises LimitReached, OSError."""
    limits = limits or ReadingLimits()
    limits.check()
    with _opened(file.path) as raw:
        is_packed = raw.read(2) == _GZIP
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw) if is_packed else raw
        size = _unpacked_size(file.path, limits) if is_packed else os.fstat(raw.fileno()).st_size
        left = MOST_BYTES
        try:
            if size > MOST_BYTES:
                _skip(stream, size - MOST_BYTES, limits)
                stream.readline(_HEAD)  # the rest of a cut line
            left_at_check = left
            # Read overlong lines, such as progress bars, in pieces.
            while left > 0 and (line := stream.readline(min(left, 1024 * 1024))):
                left -= len(line)
                if left_at_check - left >= _CHECKED_EVERY:
                    limits.check()
                    left_at_check = left
                yield line.rstrip(b"\n")
        except _DAMAGED:
            return  # the lines before count


def _skip(stream: IO[bytes] | gzip.GzipFile, size: int, limits: ReadingLimits) -> None:
    if not isinstance(stream, gzip.GzipFile):
        stream.seek(size)
        return
    while size > 0 and (piece := stream.read(min(size, 1024 * 1024))):
        size -= len(piece)
        limits.check()


def unread_bytes(file: FolderFile, limits: ReadingLimits | None = None) -> int:
    """Return how many bytes `lines_of` skips. Raises OSError."""
    with _opened(file.path) as raw:
        size = os.fstat(raw.fileno()).st_size
        is_packed = raw.read(2) == _GZIP
    # A smaller packed file cannot have more than `MOST_BYTES` unpacked.
    if is_packed and size > MOST_BYTES // _LARGEST_RATIO:
        size = _unpacked_size(file.path, limits or ReadingLimits())
    return max(size - MOST_BYTES, 0)


def _unpacked_size(path: Path, limits: ReadingLimits) -> int:
    size = 0
    with _opened(path) as raw, gzip.GzipFile(fileobj=raw) as stream:
        try:
            while piece := stream.read(1024 * 1024):
                size += len(piece)
                limits.check()
                if size > MOST_UNPACKED:
                    raise OSError(0, f"unpacked it has more than {MOST_UNPACKED:,} bytes")
        except _DAMAGED:
            pass
    return size


def _head(stream: IO[bytes]) -> bytes:
    head = stream.read(_HEAD)
    if head[:2] != _GZIP:
        return head
    stream.seek(0)
    unpacked, head = gzip.GzipFile(fileobj=stream), b""
    try:
        while len(head) < _HEAD and (piece := unpacked.read1(_HEAD - len(head))):
            head += piece
    except _DAMAGED:
        return head or b"\1"  # not text
    return head


def _opened(path: Path) -> IO[bytes]:
    # Opening a device can have effects, so check the kind before and after opening.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(0, "it is not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    stream = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        stream.close()
        raise OSError(0, "it is not a regular file")
    return stream


def _paths(directory: Path, limits: ReadingLimits, left_out: dict[str, str]) -> Iterator[Path]:
    waiting = [directory]
    while waiting:
        folder, folders = waiting.pop(), []
        try:
            limits.check()
            with os.scandir(folder) as entries:
                listed = sorted(islice(entries, _MOST_ENTRIES + 1), key=lambda entry: entry.name)
        except LimitReached as reached:
            left_out["the rest"] = str(reached.strerror)
            return
        except OSError as error:
            if folder == directory:
                raise
            left_out[str(folder.relative_to(directory))] = error.strerror or str(error)
            continue
        if len(listed) > _MOST_ENTRIES:
            name = "the rest" if folder == directory else str(folder.relative_to(directory))
            left_out[name] = f"more than {_MOST_ENTRIES:,} entries"
        for entry in listed[:_MOST_ENTRIES]:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(folder, entry.name))
            elif not entry.is_symlink():
                yield Path(folder, entry.name)
        room = _MOST_ENTRIES - len(waiting)
        if len(folders) > room:
            left_out["the rest"] = f"more than {_MOST_ENTRIES:,} folders"
        waiting.extend(reversed(folders[:room]))


def _classified(path: Path, directory: Path) -> FolderFile | None:
    """None if it is neither text nor a dump."""
    with _opened(path) as stream:
        head = _head(stream)
        written = file_times.written_at(os.fstat(stream.fileno()))
    path_read, path = path, path.with_suffix("") if path.suffix == ".gz" else path
    named = _by_our_layout(path) or _by_torchrun_layout(path, directory)
    kind, origin = named or (Kind.LINES, _by_name(path, directory, head))
    if origin.source in KERNEL_SOURCES and _is_written_by_job(path):  # so it is no evidence of the kernel
        origin = replace(origin, source="training")
    origin = replace(origin, stream=str(path_read.relative_to(directory)))
    is_pickle = head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5"  # protocols 2 to 5
    if is_pickle or _has_name_of_dump(path):
        kind = Kind.DUMP
    # A kernel log is recognised by its name or lines, whatever bytes it has.
    if kind is Kind.LINES and origin.source != "kernel" and not _is_text(head):
        return None
    return FolderFile(path_read, kind, origin, written)


def _is_text(head: bytes) -> bool:
    # PyTorch's and truncated logs have some NULs.
    if head.startswith(_UTF16):
        return True
    has_zero_at_once = head[:1] != b"\0" and b"\0" in head[:8]  # such as a binary number at the start
    return not has_zero_at_once and len(_ZEROS.findall(head)) <= _MOST_ZERO_RUNS and not _CONTROL_BYTES.search(head)


_KINDS = {
    log_layout.FLIGHT_RECORDER: Kind.DUMP,
    log_layout.ERROR: Kind.ERROR,
    log_layout.SOURCES: Kind.SOURCES,
    log_layout.ENDED: Kind.ENDED,
}


def _is_written_by_job(path: Path) -> bool:
    parts = path.resolve().parts[:-1]
    return any(log_layout.attempt_number(part) is not None or _TORCHRUN_ATTEMPT.fullmatch(part) for part in parts)


def _by_our_layout(path: Path) -> tuple[Kind, Origin] | None:
    parts = path.resolve().parts
    if path.name == _ATTEMPTS and len(parts) > 1:
        return Kind.ATTEMPTS, Origin("launcher", job=log_layout.decoded(parts[-2]) or parts[-2])
    for place in range(len(parts) - 2, 0, -1):
        if log_layout.attempt_number(parts[place]) is None:
            continue
        found = log_layout.file_at(PurePath(*parts[place - 1 :]))
        if found is None:
            return None
        source = "launcher" if found.kind in (log_layout.LAUNCHER, log_layout.ENDED) else "training"
        origin = Origin(
            source,
            node=found.node or "",
            job=found.job or found.directory,
            attempt=found.attempt,
            rank=found.rank,
            local_rank=found.local_rank,
        )
        return _KINDS.get(found.kind, Kind.LINES), origin
    return None


_ATTEMPTS = "attempts.jsonl"
_TORCHRUN_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_TORCHRUN_RANK = re.compile(r"\d{1,6}")
_TORCHRUN_FILES = {"stdout.log": Kind.LINES, "stderr.log": Kind.LINES, "error.json": Kind.ERROR}


def _by_torchrun_layout(path: Path, directory: Path) -> tuple[Kind, Origin] | None:
    """Classify ``…/attempt_0/3/stderr.log``; torchrun counts attempts from 0."""
    parts = path.relative_to(directory.parent).parts
    if len(parts) < 3 or path.name not in _TORCHRUN_FILES or not _TORCHRUN_RANK.fullmatch(parts[-2]):
        return None
    attempt = _TORCHRUN_ATTEMPT.fullmatch(parts[-3])
    if attempt is None:
        return None
    origin = Origin("training", attempt=int(attempt[1]) + 1, local_rank=int(parts[-2]))
    return _TORCHRUN_FILES[path.name], replace(origin, node=_node_of(parts[:-3]))


_NODE_WORDS = r"(?:node|host|worker|gpu|dgx|hgx)[-_]?[a-z]*\d+[\w.]*"
_NODE_PART = re.compile(rf"(?i)^{_NODE_WORDS}(?:-\w+)*$")


def _node_of(folders: tuple[str, ...]) -> str:
    return next((part for part in reversed(folders) if _NODE_PART.match(part)), "")


_RANK_NAME = re.compile(r"(?i)(?:^|[^a-z])(global[-_]?|local[-_]?)?rank[-_.]?(\d{1,6})(?!\d)")
_KERNEL_NAME = re.compile(
    r"(?i)(?:^|[-_.])(?:dmesg|kern(?:el)?|kmsg|journal(?:ctl)?(?:-?k)?|syslog|messages|pstore)(?:$|[-_.])"
)
_FABRIC_NAME = re.compile(r"(?i)fabric[-_]?manager")
_LAUNCHER_NAME = re.compile(r"(?i)(?:launcher|torchrun|accelerate|deepspeed)")
_NODE_NAME = re.compile(rf"(?i)(?:^|[-_.])({_NODE_WORDS}(?:-\d+)*)")
_SUFFIX = re.compile(r"(?i)\.(?:log|txt|out|err|json|jsonl)(?:\.\d+)?$")
_KERNEL_LINE = re.compile(rb"\[ *\+?\d+\.\d{6}\] |kern +:|\d,\d+,\d+,[^;]*;|(?:.{0,60} )?kernel: |<\d>\[")


def _by_name(path: Path, directory: Path, head: bytes) -> Origin:
    stem = _SUFFIX.sub("", path.name)
    folders = path.relative_to(directory).parts[:-1]
    is_kernel = bool(_KERNEL_NAME.search(stem)) or _looks_like_kernel(head)
    node = _node_of(folders)
    if is_kernel:
        words = [word for word in re.split(r"(?<=[-_.])|(?=[-_.])", stem) if not _KERNEL_NAME.fullmatch(word)]
        return Origin("kernel", node="".join(words).strip("-_.") or node)
    if found := _NODE_NAME.search(stem):
        node = found[1]
    if _FABRIC_NAME.search(stem):
        return Origin("fabric-manager", node=node)
    if found := _RANK_NAME.search(stem):
        is_local = (found[1] or "").lower().startswith("local")
        number = int(found[2])
        return Origin("training", node=node, rank=None if is_local else number, local_rank=number if is_local else None)
    if stem.lower().startswith("slurm"):
        return Origin("slurm", node=node)
    return Origin("launcher" if _LAUNCHER_NAME.search(stem) else "training", node=node)


def _looks_like_kernel(head: bytes) -> bool:
    lines = head.splitlines()[:50]
    return len(lines) >= 1 and all(_KERNEL_LINE.match(line) for line in lines if line.strip()) and bool(head.strip())


_DUMP_NAME = re.compile(
    r"(?i)(?:^|[-_.])(?:nccl_trace|comm_lib_trace|fr_trace|dump|flight[-_]?recorder).*\d(?:\.json|\.pkl|\.pickle)?$"
)


def _has_name_of_dump(path: Path) -> bool:
    is_in_folder = "flight" in path.parent.name.lower() and dump_reader.rank_of(path.name) is not None
    return is_in_folder or bool(_DUMP_NAME.search(path.name))


def _with_ranks(files: list[FolderFile]) -> Iterator[FolderFile]:
    """Take local ranks as ranks if all are of one node."""
    nodes = {file.origin.node for file in files if file.origin.local_rank is not None}
    for file in files:
        origin = file.origin
        if origin.rank is None and origin.local_rank is not None and len(nodes) == 1 and file.kind is not Kind.SOURCES:
            yield replace(file, origin=replace(origin, rank=origin.local_rank))
        else:
            yield file
