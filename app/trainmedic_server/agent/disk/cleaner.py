"""One cleaning: the rules that a command names, in its order, until enough is free or something ends it.

`Cleaner.clean` is called by the hand; everything below is put together here. What goes wrong with one file or
root is counted and told, and the rest is done.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmedic_server.agent.disk import files, reasons, roots, space, units
from trainmedic_server.agent.disk.files import Due
from trainmedic_server.agent.disk.holders import Holders, Inode
from trainmedic_server.agent.disk.pace import Pace, Time
from trainmedic_server.agent.disk.reasons import Reason
from trainmedic_server.agent.disk.removal import Remover
from trainmedic_server.agent.disk.report import Tally
from trainmedic_server.agent.disk.roots import Opened, Root
from trainmedic_server.agent.disk.rules import Cleaning, Deed, Kind, Rule
from trainmedic_server.agent.disk.space import Filesystems, Measure
from trainmedic_server.agent.disk.unit_removal import UnitRemover
from trainmedic_server.agent.disk.walk import Directory

_OPEN_DIRECTORIES = 32
"""Kept open between deletions, since neighbours are often of the same age."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a command asks for. ``deadline`` in seconds since the epoch; ``until_free`` in percent."""

    rules: tuple[str, ...]
    deadline: float
    until_free: float | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Cleaner:
    """Cleans by the policy's rules. The clocks, the measuring of free space and ``/proc`` are handed in; ``state_dir``
    is the agent's own, which no rule touches."""

    cleaning: Cleaning
    time: Time = field(default_factory=Time)
    measure: Measure = space.measured
    proc: str = "/proc"
    batch: int = files.BATCH
    state_dir: Path | None = None

    def clean(self, request: Request, is_stopping: Callable[[], bool]) -> Mapping[str, Any]:
        """Do it, or say what would be done; the output of the command.

        The rules must be in the policy. ``stopped`` says what ended it before everything that the rules mean
        was dealt with: the target (``free_enough``), a limit, the deadline, the end of the agent, or nothing.
        """
        pace = Pace(self.time, request.deadline, is_stopping)
        filesystems = Filesystems(self.measure, request.until_free, dry_run=request.dry_run, pace=pace)
        session = _Session(self, request, pace, filesystems, Holders(self.time, pace, self.proc))
        try:
            tallies = {name: session.apply(self.cleaning.rules[name]) for name in dict.fromkeys(request.rules)}
            return {
                "dry_run": request.dry_run,
                "files": sum(tally.files for tally in tallies.values()),
                "bytes": sum(tally.bytes for tally in tallies.values()),
                **filesystems.output(),
                "stopped": pace.halt or session.ended,
                "rules": {name: tally.output() for name, tally in tallies.items()},
            }
        finally:
            filesystems.close()


@dataclass(slots=True)
class _Session:
    """What the rules of one cleaning share."""

    cleaner: Cleaner
    request: Request
    pace: Pace
    filesystems: Filesystems
    holders: Holders
    gone: set[Inode] = field(default_factory=set)
    """What is still there in a trial run and would not be in a cleaning; for the rules that follow."""
    files: int = 0
    bytes: int = 0
    ended: Reason | None = None
    """What ended the last rule that was not done to its end."""

    def apply(self, rule: Rule) -> Tally:
        tally = Tally(checkpoints=0 if rule.kind is Kind.CHECKPOINTS else None)
        if self.pace.halt is None:
            state_dir = self.cleaner.state_dir
            spared = roots.identity(state_dir) if state_dir is not None else None
            with roots.opened(rule.roots, self.cleaner.cleaning.owners, spared) as opened:
                _Turn(self, rule, tally).take(opened)
        return tally


@dataclass(slots=True)
class _Turn:
    """One rule's turn."""

    session: _Session
    rule: Rule
    tally: Tally
    considered: int = 0

    def take(self, opened: Opened) -> None:
        self.tally.refused.update(opened.refused)
        usable = tuple(root for root in opened.roots if self._is_usable(root))
        wanted = tuple(root for root in usable if self._is_called_for(root))
        self.tally.enough.extend(root.path for root in usable if root not in wanted)
        if len(usable) > 0 and not wanted:
            self.session.ended = Reason.FREE_ENOUGH
        youngest = round((self.session.cleaner.time.now() - self.rule.min_age.total_seconds()) * 1e9)
        ended = (self._clean_files if self.rule.kind is Kind.FILES else self._clean_units)(wanted, youngest)
        ended = ended or self.session.pace.halt
        if ended is not None:
            self.session.ended = ended
            self.tally.left_over(ended, self.tally.matched - self.considered)

    def _is_usable(self, root: Root) -> bool:
        try:
            self.session.filesystems.seen(root.device, root.fd, root.path)
        except OSError as error:
            self.tally.refused[root.path] = f"{root.path}: its free space cannot be read: {error.strerror}"
            return False
        return True

    def _is_called_for(self, root: Root) -> bool:
        """Whether the rule is to work on a root at all."""
        limit = self.rule.when_free_below
        if limit is not None and self.session.filesystems.now(root.device).percent >= limit:
            return False
        return not self._has_enough(root)

    def _has_enough(self, root: Root) -> bool:
        return self.session.filesystems.has_enough(root.device)

    def _clean_files(self, wanted: tuple[Root, ...], youngest: int) -> Reason | None:
        session = self.session
        search = files.Search(
            self.rule, wanted, youngest, session.pace, self.tally, session.gone, session.cleaner.batch
        )
        enough: set[int] = set()
        remover = Remover(session.holders, session.request.dry_run)
        with _OpenDirectories() as parents:
            for batch in search.batches(lambda root: root.device not in enough):
                for due in batch:
                    root = due.directory.root
                    if root.device in enough or self._has_enough(root):
                        enough.add(root.device)
                        if len(enough) == len({one.device for one in wanted}):
                            return Reason.FREE_ENOUGH
                        continue
                    if not session.pace.goes_on():
                        return session.pace.halt
                    if self._files_left() < 1:
                        return Reason.LIMIT_FILES
                    self.considered += 1
                    self._settle(due, self._remove(remover, parents, due, youngest))
        return Reason.FREE_ENOUGH if enough else None

    def _remove(self, remover: Remover, parents: _OpenDirectories, due: Due, youngest: int) -> int | Reason:
        if due.size > self._bytes_left():
            return Reason.LIMIT_BYTES
        try:
            parent = parents.fd_of(due.directory)
        except OSError as error:
            return reasons.of(error)
        if self.rule.do is Deed.TRUNCATE:
            return remover.truncate(parent, due.chosen, self.rule.age_by, youngest)
        return remover.delete(parent, due.chosen, self.rule.age_by)

    def _settle(self, due: Due, outcome: int | Reason) -> None:
        if isinstance(outcome, Reason):
            self.tally.left(outcome, due.directory, due.name)
            return
        device = due.directory.root.device
        self._count(device, 1, outcome)
        request = self.session.request
        if request.dry_run and len(request.rules) > 1:
            self.session.gone.add((device, due.chosen.inode))

    def _clean_units(self, wanted: tuple[Root, ...], youngest: int) -> Reason | None:
        session = self.session
        search = units.Search(self.rule, wanted, youngest, session.pace, self.tally, session.gone)
        remover = UnitRemover(session.holders, session.pace, self.rule.age_by, youngest, session.request.dry_run)
        ended = None
        for unit in search.due(lambda _: True):
            if not session.pace.goes_on():
                return session.pace.halt
            if self._has_enough(unit.directory.root):
                ended = Reason.FREE_ENOUGH
                self.considered += 1
                self.tally.left(ended, unit.directory, "")
                continue
            self.considered += 1
            if unit.survey.files > self._files_left() or unit.survey.bytes > self._bytes_left():
                too_many = unit.survey.files > self._files_left()
                self.tally.left(Reason.LIMIT_FILES if too_many else Reason.LIMIT_BYTES, unit.directory, "")
                continue
            removed = remover.delete(unit)
            self._count(unit.directory.root.device, removed.files, removed.bytes)
            if removed.reason is not None:
                self.tally.left(removed.reason, unit.directory, "")
                continue
            self.tally.checkpoints = (self.tally.checkpoints or 0) + 1
            if session.request.dry_run:
                session.gone.add(unit.inode)
        return ended

    def _count(self, device: int, count: int, size: int) -> None:
        self.tally.files += count
        self.tally.bytes += size
        self.session.files += count
        self.session.bytes += size
        self.session.filesystems.freed(device, size)

    def _files_left(self) -> int:
        """Files that may still be deleted, by the policy and by the rule."""
        own = self.rule.max_files
        return min(
            self.session.cleaner.cleaning.max_files - self.session.files,
            10**9 if own is None else own - self.tally.files,
        )

    def _bytes_left(self) -> int:
        most, own = self.session.cleaner.cleaning.max_bytes, self.rule.max_bytes
        return min(
            2**63 if most is None else most - self.session.bytes,
            2**63 if own is None else own - self.tally.bytes,
        )


class _OpenDirectories:
    """The directories that were used last, open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Directory, int] = OrderedDict()

    def __enter__(self) -> _OpenDirectories:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def fd_of(self, directory: Directory) -> int:
        """Raises OSError where it is no longer there."""
        if directory in self._open:
            self._open.move_to_end(directory)
            return self._open[directory]
        fd = directory.reopened()
        self._open[directory] = fd
        if len(self._open) > _OPEN_DIRECTORIES:
            os.close(self._open.popitem(last=False)[1])
        return fd
