"""Search for a rule's files or checkpoints, oldest first, in bounded memory.

Each walk keeps the `BATCH_SIZE` oldest files; the next continues after the last. The order is total, so that a trial
run finds the same files.
"""

from __future__ import annotations

import heapq
import os
import stat
import struct
from collections.abc import Generator, Iterable, Iterator, Set
from contextlib import closing
from pathlib import PurePath

from msgspec import Struct, field

from trainmedic_agent.disk import checkpoints
from trainmedic_agent.disk.checkpoints import CheckpointTraits
from trainmedic_agent.disk.filesystems import Inode, Root, freed_bytes, inode_of, stored_bytes
from trainmedic_agent.disk.metadata_reader import MetadataReader, MetadataUnread
from trainmedic_agent.disk.report import Reason, RuleCounters
from trainmedic_agent.disk.rules import AgeBy, CleaningOperation, CleaningRule
from trainmedic_agent.disk.throttle import Throttle
from trainmedic_agent.disk.walk import DELETING, VisitDirectory, Walk, WalkedDirectory, WalkedEntry

BATCH_SIZE = 30_000  # files
MAX_CHECKPOINTS = 20_000  # checkpoints per rule; with more, none is deleted

_KEY = struct.Struct(">QHQ")  # last use, root index, inode: packed, they sort as bytes
_DETAILS = struct.Struct(">QI")  # bytes on disk, directory number
_TIME_OFFSET = 2**63  # makes times before 1970 positive too


class _Search(Struct):
    rule: CleaningRule
    roots: tuple[Root, ...]
    cutoff_ns: int
    """Nanoseconds since the epoch; entries used later are too young."""
    throttle: Throttle
    counters: RuleCounters
    gone: Set[Inode]  # entries that a trial run counts as deleted

    def _walk(self, root: Root, visit: VisitDirectory) -> closing[Generator[WalkedEntry, None, None]]:
        return closing(Walk(self.rule.globs, self.rule.exclude, self.throttle, self.counters.skip, visit)(root))

    def _is_checkpoint(self, directory: WalkedDirectory, name: str) -> bool | None:
        # True also for a partly deleted one. None, and counted as skipped, if a marker cannot be looked up.
        try:
            return name.startswith(DELETING) or checkpoints.is_checkpoint(directory.fd, name)
        except MetadataUnread:
            self.counters.skip(Reason.METADATA_UNREAD, directory, "")
            return None


class MatchedFile(Struct, frozen=True):
    directory: WalkedDirectory
    name: str
    inode: Inode
    last_used_ns: int
    stored: int
    """Bytes on disk."""


class _OldestFiles(Struct):
    """The `size` oldest files after a key, packed into a quarter of the memory of objects."""

    size: int
    after: bytes
    bound: bytes | None = None  # files from this key on are for later batches
    _packed: list[bytes] = field(default_factory=list)
    _numbers: dict[WalkedDirectory, int] = field(default_factory=dict)
    _next_number: int = 0

    def add(self, last_used_ns: int, root: int, status: os.stat_result, directory: WalkedDirectory, name: str) -> None:
        key = _KEY.pack(last_used_ns + _TIME_OFFSET, root, status.st_ino)
        if key <= self.after or (self.bound is not None and key >= self.bound):
            return
        number = self._numbers.get(directory)
        if number is None:
            number = self._numbers[directory] = self._next_number
            self._next_number += 1
        self._packed.append(key + _DETAILS.pack(stored_bytes(status), number) + os.fsencode(name))
        if len(self._packed) >= 2 * self.size:
            self.trim()

    def trim(self) -> None:
        self._packed.sort()
        if len(self._packed) <= self.size:
            return
        self.bound = self._packed[self.size][: _KEY.size]
        del self._packed[self.size :]
        used = {_DETAILS.unpack_from(packed, _KEY.size)[1] for packed in self._packed}
        self._numbers = {directory: number for directory, number in self._numbers.items() if number in used}

    def last_key(self) -> bytes | None:
        return self._packed[-1][: _KEY.size] if self._packed else None

    def __iter__(self) -> Iterator[MatchedFile]:
        directories = {number: directory for directory, number in self._numbers.items()}
        for packed in self._packed:
            time, _, inode_number = _KEY.unpack_from(packed)
            stored, number = _DETAILS.unpack_from(packed, _KEY.size)
            directory = directories[number]
            name = os.fsdecode(packed[_KEY.size + _DETAILS.size :])
            yield MatchedFile(directory, name, (directory.root.device, inode_number), time - _TIME_OFFSET, stored)


class FileSearch(_Search):
    batch_size: int = BATCH_SIZE

    def batches(self, enough: Set[int]) -> Iterator[Iterable[MatchedFile]]:
        """Yield matching files, oldest first, in batches.

        Roots on devices in `enough`, which the caller may extend, are not walked again.
        """
        after = b""
        while True:
            oldest = _OldestFiles(self.batch_size, after)
            for index, root in enumerate(self.roots):
                if root.device not in enough:
                    self._search_root(index, root, oldest)
            self.counters.is_first_pass = False
            oldest.trim()
            last = oldest.last_key()
            if last is None or self.throttle.stop_reason is not None:
                return
            after = last
            yield oldest
            if oldest.bound is None:
                return

    def _search_root(self, index: int, root: Root, oldest: _OldestFiles) -> None:
        newest_of: dict[WalkedDirectory, list[tuple[int, int, os.stat_result, str]]] = {}
        with self._walk(root, self._visit) as entries:
            for directory, entry in entries:
                if entry is None:  # the directory's end, so its newest are known
                    for _, _, _, name in newest_of.pop(directory, ()):
                        self.counters.skip(Reason.NEWEST, directory, name)
                    continue
                status = self._stat(directory, entry)
                if status is None:
                    continue
                name = entry.name
                if self.rule.keep_newest:
                    # A heap of the newest so far: each further file pushes out the oldest, which is judged.
                    newest = newest_of.setdefault(directory, [])
                    item = (status.st_mtime_ns, status.st_ino, status, name)
                    if len(newest) < self.rule.keep_newest:
                        heapq.heappush(newest, item)
                        continue
                    _, _, status, name = heapq.heappushpop(newest, item)
                last_used = self.rule.age_by.last_used_ns(status, root.access_times)
                reason = self._obstacle(status, last_used)
                if reason is None:
                    self.counters.matched += self.counters.is_first_pass
                    oldest.add(last_used, index, status, directory, name)
                else:
                    self.counters.skip(reason, directory, name)

    def _visit(self, directory: WalkedDirectory, is_matched: bool) -> bool:
        name = directory.name or PurePath(directory.root.path).name
        is_checkpoint = self._is_checkpoint(directory, name)
        if is_checkpoint:
            self.counters.skip(Reason.IN_CHECKPOINT, directory, "")
        return is_checkpoint is False

    def _stat(self, directory: WalkedDirectory, entry: os.DirEntry[str]) -> os.stat_result | None:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:  # it has vanished
            return None
        if not stat.S_ISREG(status.st_mode):
            self.counters.skip(Reason.SPECIAL, directory, entry.name)
            return None
        return None if inode_of(status) in self.gone else status

    def _obstacle(self, status: os.stat_result, last_used_ns: int) -> Reason | None:
        if status.st_nlink > 1:
            return Reason.HARD_LINK
        if last_used_ns > self.cutoff_ns:
            return Reason.YOUNG
        if not self.rule.allows_size(stored_bytes(status)):
            return Reason.SIZE
        kept_bytes = self.rule.keep_tail if self.rule.do is CleaningOperation.SHRINK else 0
        has_nothing_to_free = stored_bytes(status) <= (kept_bytes or 0)
        if has_nothing_to_free and self.rule.do is not CleaningOperation.DELETE:
            return Reason.EMPTY
        return None


class CheckpointContents(Struct, frozen=True):
    """Times are in nanoseconds since the epoch."""

    files: int
    bytes: int  # that deletion frees
    last_used_ns: int
    written_ns: int
    obstacle: Reason | None  # why it must not be deleted


class MatchedCheckpoint(Struct, frozen=True):
    root_index: int  # in the rule, to sort equally old ones
    directory: WalkedDirectory
    inode: Inode
    contents: CheckpointContents


class CheckpointSearch(_Search):
    metadata: MetadataReader
    _count: int = 0  # checkpoints found, including those beyond the limit
    _matched: list[MatchedCheckpoint] = field(default_factory=list)

    def find(self) -> list[MatchedCheckpoint]:
        """Return matching checkpoints, oldest first.

        The list is empty with more than `MAX_CHECKPOINTS`, or if the throttle ended the search: the newest are then
        unknown.
        """
        for index, root in enumerate(self.roots):
            self._search_root(index, root)
        if self._count > MAX_CHECKPOINTS:
            self.counters.leave_rest(Reason.TOO_MANY, self._count)
            return []
        if self.throttle.stop_reason is not None:
            return []
        self.counters.matched = len(self._matched)
        self.counters.is_first_pass = False
        return sorted(
            self._matched,
            key=lambda checkpoint: (checkpoint.contents.last_used_ns, checkpoint.root_index, checkpoint.inode[1]),
        )

    def _search_root(self, index: int, root: Root) -> None:
        siblings_in: dict[WalkedDirectory, list[tuple[MatchedCheckpoint, CheckpointTraits]]] = {}

        def visit(directory: WalkedDirectory, is_matched: bool) -> bool:
            name = directory.name
            if not is_matched or directory.parent is None:
                return True
            is_checkpoint = self._is_checkpoint(directory, name)
            if is_checkpoint is None:
                return False
            if not is_checkpoint:
                self.counters.skip(Reason.NOT_A_CHECKPOINT, directory, "")
                return True
            self._count += 1
            if self._count <= MAX_CHECKPOINTS:
                inode = inode_of(os.fstat(directory.fd))
                contents = survey(directory, self.rule.age_by, self.throttle)
                if inode not in self.gone:
                    traits = checkpoints.traits_of(
                        directory.parent.fd, directory.fd, name, contents.written_ns, self.metadata
                    )
                    checkpoint = MatchedCheckpoint(index, directory, inode, contents)
                    siblings_in.setdefault(directory.parent, []).append((checkpoint, traits))
            return False

        with self._walk(root, visit) as entries:
            for directory, entry in entries:
                if entry is None:  # the directory's end
                    self._judge(siblings_in.pop(directory, []))

    def _judge(self, siblings: list[tuple[MatchedCheckpoint, CheckpointTraits]]) -> None:
        whole = [traits for _, traits in siblings if not traits.name.startswith(DELETING)]
        kept = checkpoints.kept(whole, self.rule.keep_newest)
        for checkpoint, traits in siblings:
            reason = Reason.PINNED if traits.is_pinned else kept.get(traits.name)
            if reason is None and not traits.is_known:
                reason = Reason.METADATA_UNREAD
            reason = reason or self._obstacle(checkpoint)
            if reason is None:
                self._matched.append(checkpoint)
            else:
                self.counters.skip(reason, checkpoint.directory, "")

    def _obstacle(self, checkpoint: MatchedCheckpoint) -> Reason | None:
        contents = checkpoint.contents
        if contents.obstacle is not None:
            return contents.obstacle
        if contents.last_used_ns > self.cutoff_ns:
            return Reason.YOUNG
        # An interrupted deletion's remains no longer have the checkpoint's size, but must go too.
        is_begun = checkpoint.directory.name.startswith(DELETING)
        return None if is_begun or self.rule.allows_size(contents.bytes) else Reason.SIZE


def survey(directory: WalkedDirectory, age_by: AgeBy, throttle: Throttle) -> CheckpointContents:
    """Summarise a checkpoint directory. After an interrupted deletion only the remaining files' ages count."""
    is_begun = directory.name.startswith(DELETING)
    times = directory.root.access_times
    files = size = links = last_used = written = 0
    obstacle: Reason | None = None

    def obstruct(reason: Reason, *_: object) -> None:
        nonlocal obstacle
        obstacle = obstacle or reason

    def count_age(status: os.stat_result) -> None:
        nonlocal last_used, written
        last_used, written = max(last_used, age_by.last_used_ns(status, times)), max(written, status.st_mtime_ns)

    def visit(inner: WalkedDirectory, is_matched: bool) -> bool:
        if not is_begun:
            count_age(os.fstat(inner.fd))
        return True

    with closing(directory.walk_all(throttle, obstruct, visit)) as entries:
        for _, entry in entries:
            if entry is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                obstruct(Reason.CHANGED)
                continue
            files += 1
            links += status.st_nlink > 1
            size += freed_bytes(status)
            count_age(status)
    # An interrupted walk has not seen everything.
    obstacle = obstacle or throttle.stop_reason
    if obstacle is None and links and not size:
        obstacle = Reason.HARD_LINK
    return CheckpointContents(files, size, last_used, written, obstacle)
