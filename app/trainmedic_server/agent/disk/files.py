"""Finding the files that a rule of kind ``files`` is to delete or empty: the oldest first, in bounded memory.

A directory tree cannot be listed by age, and a million names do not fit. So the trees are gone through and
only the `BATCH` oldest files are remembered; when these have been dealt with and that was not enough, the
trees are gone through again for the next oldest. The order is total (time, root, inode), and each round
takes up where the last one ended, so that a trial run, after which everything is still there, comes upon
the same files.
"""

from __future__ import annotations

import heapq
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import PurePath

from trainmedic_server.agent.disk import checkpoints
from trainmedic_server.agent.disk.ages import stamp_of
from trainmedic_server.agent.disk.globs import State
from trainmedic_server.agent.disk.holders import Inode
from trainmedic_server.agent.disk.pace import Pace
from trainmedic_server.agent.disk.reasons import Reason
from trainmedic_server.agent.disk.removal import STORED, Chosen
from trainmedic_server.agent.disk.report import Tally
from trainmedic_server.agent.disk.roots import Root
from trainmedic_server.agent.disk.rules import Deed, Rule
from trainmedic_server.agent.disk.walk import DELETING, Directory, Walk

BATCH = 30_000

_KEY = struct.Struct(">QHQ")
"""The time from which the age counts, the root's number, the inode: packed, they sort as bytes."""
_REST = struct.Struct(">QI")
"""The bytes that it takes and the number of its directory; its name follows."""
_EPOCH = 2**63
"""Added to times, of which some are before 1970."""


@dataclass(frozen=True, slots=True)
class Due:
    """A file whose turn has come when all before it are done."""

    directory: Directory
    size: int
    chosen: Chosen

    @property
    def name(self) -> str:
        return self.chosen.name


@dataclass(slots=True)
class _Oldest:
    """The oldest of all that is added, `size` of them: packed, in a quarter of the memory of as many objects."""

    size: int
    after: bytes
    bound: bytes | None = None
    _packed: list[bytes] = field(default_factory=list)
    _numbers: dict[Directory, int] = field(default_factory=dict)
    _next: int = 0

    def add(self, stamp: int, root: int, inode: int, size: int, directory: Directory, name: str) -> None:
        key = _KEY.pack(stamp + _EPOCH, root, inode)
        if key <= self.after or (self.bound is not None and key >= self.bound):
            return
        number = self._numbers.get(directory)
        if number is None:
            number = self._numbers[directory] = self._next
            self._next += 1
        self._packed.append(key + _REST.pack(size, number) + os.fsencode(name))
        if len(self._packed) >= 2 * self.size:
            self.trim()

    def trim(self) -> None:
        """Sort, and forget what is too young, with the directories that nothing is left of."""
        self._packed.sort()
        if len(self._packed) <= self.size:
            return
        self.bound = self._packed[self.size][: _KEY.size]
        del self._packed[self.size :]
        used = {_REST.unpack_from(packed, _KEY.size)[1] for packed in self._packed}
        self._numbers = {directory: number for directory, number in self._numbers.items() if number in used}

    def last(self) -> bytes | None:
        """The key of the youngest; None where there is nothing."""
        return self._packed[-1][: _KEY.size] if self._packed else None

    def due(self) -> Iterator[Due]:
        directories = {number: directory for directory, number in self._numbers.items()}
        for packed in self._packed:
            stamp, _, inode = _KEY.unpack_from(packed)
            size, number = _REST.unpack_from(packed, _KEY.size)
            directory = directories[number]
            name = os.fsdecode(packed[_KEY.size + _REST.size :])
            yield Due(directory, size, Chosen(name, directory.root.device, inode, stamp - _EPOCH))


@dataclass(slots=True)
class Search:
    """What a rule of kind ``files`` finds below its open roots.

    ``youngest`` is the latest time of a file that is old enough. ``gone`` holds what earlier rules of a
    trial run would have deleted.
    """

    rule: Rule
    roots: tuple[Root, ...]
    youngest: int
    pace: Pace
    tally: Tally
    gone: set[Inode]
    batch: int = BATCH

    def batches(self, is_wanted: Callable[[Root], bool]) -> Iterator[Iterator[Due]]:
        """All that is due, oldest first, some at a time; only of the roots that are still wanted then.

        Ends early, and without those that were being gathered, when the pace says so.
        """
        after = b""
        while True:
            oldest = _Oldest(self.batch, after)
            for number, root in enumerate(self.roots):
                if is_wanted(root):
                    self._look(number, root, oldest)
            self.tally.listening = False
            oldest.trim()
            last = oldest.last()
            if last is None or self.pace.halt is not None:
                return
            after = last
            yield oldest.due()
            if oldest.bound is None:
                return

    def _look(self, number: int, root: Root, oldest: _Oldest) -> None:
        walk = Walk(
            State.of(self.rule.globs), State.of(self.rule.exclude), self.pace, self.tally.looked_over, self._visit
        )
        kept: dict[Directory, list[tuple[int, int, os.stat_result, str]]] = {}
        with closing(walk(root)) as found:
            for directory, entry in found:
                if entry is None:
                    for _, _, _, name in kept.pop(directory, ()):
                        self.tally.looked_over(Reason.NEWEST, directory, name)
                    continue
                facts = self._facts(directory, entry)
                if facts is None:
                    continue
                name = entry.name
                if self.rule.keep_newest:
                    newest = kept.setdefault(directory, [])
                    item = (facts.st_mtime_ns, facts.st_ino, facts, name)
                    if len(newest) < self.rule.keep_newest:
                        heapq.heappush(newest, item)
                        continue
                    _, _, facts, name = heapq.heappushpop(newest, item)
                self._judge(number, directory, name, facts, oldest)

    def _visit(self, directory: Directory, is_matched: bool) -> bool:
        name = directory.name or PurePath(directory.root.path).name
        if name.startswith(DELETING) or checkpoints.is_checkpoint(directory.fd, name):
            self.tally.looked_over(Reason.IN_CHECKPOINT, directory, "")
            return False
        return True

    def _facts(self, directory: Directory, entry: os.DirEntry[str]) -> os.stat_result | None:
        try:
            facts = entry.stat(follow_symlinks=False)
        except OSError:  # it has vanished
            return None
        if not stat.S_ISREG(facts.st_mode):
            self.tally.looked_over(Reason.SPECIAL, directory, entry.name)
            return None
        return None if (facts.st_dev, facts.st_ino) in self.gone else facts

    def _judge(self, number: int, directory: Directory, name: str, facts: os.stat_result, oldest: _Oldest) -> None:
        rule, stored = self.rule, facts.st_blocks * STORED
        stamp = stamp_of(facts, rule.age_by)
        if facts.st_nlink > 1:
            reason = Reason.HARD_LINK
        elif stamp > self.youngest:
            reason = Reason.YOUNG
        elif (rule.min_size is not None and stored < rule.min_size) or (
            rule.max_size is not None and stored > rule.max_size
        ):
            reason = Reason.SIZE
        elif rule.do is Deed.TRUNCATE and not stored:
            reason = Reason.EMPTY
        else:
            self.tally.matched += self.tally.listening
            oldest.add(stamp, number, facts.st_ino, stored, directory, name)
            return
        self.tally.looked_over(reason, directory, name)
