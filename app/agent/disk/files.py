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
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

from app.agent.disk import checkpoints
from app.agent.disk.ages import stamp_of
from app.agent.disk.globs import State
from app.agent.disk.holders import Inode
from app.agent.disk.pace import Pace
from app.agent.disk.reasons import Reason
from app.agent.disk.removal import STORED, Chosen
from app.agent.disk.report import Tally
from app.agent.disk.roots import Root
from app.agent.disk.rules import Deed, Rule
from app.agent.disk.walk import DELETING, Directory, Walk

BATCH = 20_000

Key = tuple[int, int, int]
"""The time from which the age counts, the root's number, the inode."""


class Due(NamedTuple):
    """A file whose turn has come when all before it are done."""

    key: Key
    size: int
    directory: Directory
    name: str

    @property
    def chosen(self) -> Chosen:
        stamp, _, inode = self.key
        return Chosen(self.name, self.directory.root.device, inode, stamp)


@dataclass(slots=True)
class _Oldest:
    """The oldest of all that is added, `size` of them."""

    size: int
    after: Key
    bound: Key | None = None
    _due: list[Due] = field(default_factory=list)

    def add(self, due: Due) -> None:
        if due.key <= self.after or (self.bound is not None and due.key >= self.bound):
            return
        self._due.append(due)
        if len(self._due) >= 2 * self.size:
            self.sorted()

    def sorted(self) -> list[Due]:
        self._due.sort(key=lambda due: due.key)
        if len(self._due) > self.size:
            self.bound = self._due[self.size].key
            del self._due[self.size :]
        return self._due


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

    def batches(self, is_wanted: Callable[[Root], bool]) -> Iterator[list[Due]]:
        """All that is due, oldest first, a list at a time; only of the roots that are still wanted then.

        Ends early, and without the list that was being made, when the pace says so.
        """
        after: Key = (-(2**63), -1, -1)
        while True:
            oldest = _Oldest(self.batch, after)
            for number, root in enumerate(self.roots):
                if is_wanted(root):
                    self._look(number, root, oldest)
            self.tally.listening = False
            due = oldest.sorted()
            if not due or self.pace.halt is not None:
                return
            after = due[-1].key
            yield due
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
            oldest.add(Due((stamp, number, facts.st_ino), stored, directory, name))
            return
        self.tally.looked_over(reason, directory, name)
