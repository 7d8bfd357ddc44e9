"""Finding the checkpoints that a rule of kind ``checkpoints`` is to delete, the oldest first.

Each directory that the rule's patterns match, and that is a checkpoint, is surveyed whole; then those of one
directory are compared (`checkpoints.staying`). A checkpoint inside another belongs to that one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

from trainmedic_server.agent.disk import checkpoints
from trainmedic_server.agent.disk.ages import stamp_of
from trainmedic_server.agent.disk.checkpoints import Standing
from trainmedic_server.agent.disk.globs import Glob, State
from trainmedic_server.agent.disk.holders import Inode
from trainmedic_server.agent.disk.pace import Pace
from trainmedic_server.agent.disk.reasons import Reason
from trainmedic_server.agent.disk.removal import STORED
from trainmedic_server.agent.disk.report import Tally
from trainmedic_server.agent.disk.roots import Root
from trainmedic_server.agent.disk.rules import AgeBy, Rule
from trainmedic_server.agent.disk.walk import DELETING, Directory, Walk

MOST = 20_000
"""Checkpoints that one rule looks at; where there are more, none is deleted."""
_EVERYTHING = State.of([Glob.read("**")])
_NOTHING = State.of([])


@dataclass(frozen=True, slots=True)
class Survey:
    """A directory with all that is in it. ``stamp`` is the latest time from which the age of anything counts,
    ``written`` the latest write; ``bytes`` what deleting it frees. ``obstacle``: why it cannot be deleted whole.
    """

    files: int
    bytes: int
    stamp: int
    written: int
    obstacle: Reason | None


@dataclass(frozen=True, slots=True)
class Unit:
    """A checkpoint whose turn has come when all before it are done."""

    number: int
    directory: Directory
    inode: Inode
    survey: Survey

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.survey.stamp, self.number, self.inode[1])


@dataclass(slots=True)
class Search:
    """What a rule of kind ``checkpoints`` finds below its open roots; see `files.Search` for the fields."""

    rule: Rule
    roots: tuple[Root, ...]
    youngest: int
    pace: Pace
    tally: Tally
    gone: set[Inode]
    _count: int = 0
    _due: list[Unit] = field(default_factory=list)

    def due(self, is_wanted: Callable[[Root], bool]) -> list[Unit]:
        """All that is due, oldest first; empty where the pace ended the search."""
        for number, root in enumerate(self.roots):
            if is_wanted(root):
                self._look(number, root)
        if self._count > MOST:
            self.tally.left_over(Reason.TOO_MANY, self._count)
            return []
        if self.pace.halt is not None:
            return []
        self.tally.matched = len(self._due)
        self.tally.listening = False
        return sorted(self._due, key=lambda unit: unit.key)

    def _look(self, number: int, root: Root) -> None:
        siblings: dict[Directory, list[tuple[Unit, Standing]]] = {}

        def visit(directory: Directory, is_matched: bool) -> bool:
            name = directory.name
            if not is_matched or directory.above is None:
                return True
            if not name.startswith(DELETING) and not checkpoints.is_checkpoint(directory.fd, name):
                self.tally.looked_over(Reason.NOT_A_CHECKPOINT, directory, "")
                return True
            self._count += 1
            if self._count <= MOST:
                facts = os.fstat(directory.fd)
                found = survey(directory, self.rule.age_by, self.pace)
                unit = Unit(number, directory, (facts.st_dev, facts.st_ino), found)
                if unit.inode not in self.gone:
                    standing = checkpoints.standing(directory.above.fd, directory.fd, name, found.written)
                    siblings.setdefault(directory.above, []).append((unit, standing))
            return False

        walk = Walk(State.of(self.rule.globs), State.of(self.rule.exclude), self.pace, self.tally.looked_over, visit)
        with closing(walk(root)) as found:
            for directory, entry in found:
                if entry is None:
                    self._judge(siblings.pop(directory, []))

    def _judge(self, siblings: list[tuple[Unit, Standing]]) -> None:
        """Of the checkpoints of one directory, those that are due."""
        begun = {unit.inode for unit, standing in siblings if standing.name.startswith(DELETING)}
        stay = checkpoints.staying(
            [standing for unit, standing in siblings if unit.inode not in begun], self.rule.keep_newest
        )
        rule = self.rule
        for unit, standing in siblings:
            found = unit.survey
            reason = Reason.PINNED if standing.is_pinned else stay.get(standing.name)
            if reason is None:
                reason = found.obstacle
            if reason is None and found.stamp > self.youngest:
                reason = Reason.YOUNG
            if reason is None and unit.inode not in begun:
                too_small = rule.min_size is not None and found.bytes < rule.min_size
                too_large = rule.max_size is not None and found.bytes > rule.max_size
                reason = Reason.SIZE if too_small or too_large else None
            if reason is None:
                self._due.append(unit)
            else:
                self.tally.looked_over(reason, unit.directory, "")


def survey(directory: Directory, age_by: AgeBy, pace: Pace) -> Survey:
    """All that is in an open directory. One whose deletion was begun is as old as the files that are left in it."""
    begun = directory.name.startswith(DELETING)
    files = size = linked = stamp = written = 0
    obstacle: Reason | None = None

    def obstructed(reason: Reason, where: Directory, name: str) -> None:
        nonlocal obstacle
        obstacle = obstacle or reason

    def enter(inner: Directory, is_matched: bool) -> bool:
        nonlocal stamp, written
        if not begun:
            facts = os.fstat(inner.fd)
            stamp, written = max(stamp, stamp_of(facts, age_by)), max(written, facts.st_mtime_ns)
        return True

    top = replace(directory.root, path=directory.path(), fd=directory.fd)
    with closing(Walk(_EVERYTHING, _NOTHING, pace, obstructed, enter)(top)) as found:
        for inner, entry in found:
            if entry is None:
                continue
            try:
                facts = entry.stat(follow_symlinks=False)
            except OSError:
                obstructed(Reason.CHANGED, inner, entry.name)
                continue
            files += 1
            linked += facts.st_nlink > 1
            size += facts.st_blocks * STORED if facts.st_nlink == 1 else 0
            stamp, written = max(stamp, stamp_of(facts, age_by)), max(written, facts.st_mtime_ns)
    if obstacle is None and pace.halt is not None:
        obstacle = pace.halt
    if obstacle is None and linked and not size:
        obstacle = Reason.HARD_LINK
    return Survey(files, size, stamp, written, obstacle)
