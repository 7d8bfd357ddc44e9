"""Execution of a cleaning command: its rules in order, until enough space is free."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_agent.disk.access_times import access_times
from trainmedic_agent.disk.checkpoint_removal import CheckpointRemover
from trainmedic_agent.disk.filesystems import (
    Filesystems,
    Inode,
    MeasureSpace,
    OpenedRoots,
    Root,
    inode_at,
    measure_space,
    opened_roots,
)
from trainmedic_agent.disk.metadata_reader import MetadataReader
from trainmedic_agent.disk.mounts import FilesystemSearch, NamedFilesystem
from trainmedic_agent.disk.open_files import FileUsage
from trainmedic_agent.disk.read_watch import ReadWatch
from trainmedic_agent.disk.removal import FileRemover
from trainmedic_agent.disk.report import Reason, RuleCounters, outputs, printable
from trainmedic_agent.disk.rules import AgeBy, CleaningOperation, CleaningPolicy, CleaningRule, EntryKind
from trainmedic_agent.disk.search import BATCH_SIZE, CheckpointSearch, FileSearch, MatchedCheckpoint, MatchedFile
from trainmedic_agent.disk.throttle import Clocks, Throttle
from trainmedic_agent.disk.walk import WalkedDirectory

log = logging.getLogger(__name__)

_OPEN_DIRECTORIES = 32  # directories kept open: files of similar age often share one
_UNLIMITED = 2**63  # files or bytes
_SHOWN_NAMES = 4  # file systems named in a refusal


class CleaningRequest(Struct, frozen=True):
    rules: tuple[str, ...]  # names
    deadline: float
    """Seconds since the epoch."""
    until_free: float | None = None
    """Percentage of free space at which to stop, if any."""
    dry_run: bool = False
    filesystems: tuple[NamedFilesystem, ...] = ()  # file systems in need; empty: all


class Cleaner(Struct, frozen=True):
    cleaning: CleaningPolicy
    clocks: Clocks = field(default_factory=Clocks)
    measure: MeasureSpace = measure_space
    proc: str = "/proc"
    batch_size: int = BATCH_SIZE
    state_dir: Path | None = None  # the agent's, which no rule cleans

    def clean(self, request: CleaningRequest, is_stopping: Callable[[], bool]) -> Mapping[str, Any]:
        """Return the output of a command with existing rules.

        ``stopped``: reason for an early end, or None.
        """
        throttle = Throttle(self.clocks, request.deadline, is_stopping)
        filesystems = Filesystems(self.measure, request.until_free, dry_run=request.dry_run, throttle=throttle)
        search = FilesystemSearch(request.filesystems, Path(self.proc)) if request.filesystems else None
        run = _CleaningRun(self, request, throttle, filesystems, FileUsage(self.clocks, throttle, self.proc), search)
        try:
            counters = {name: run.run_rule(self.cleaning.rules[name]) for name in dict.fromkeys(request.rules)}
            return {
                "dry_run": request.dry_run,
                "files": run.files,
                "bytes": run.bytes,
                **filesystems.output(),
                "stopped": throttle.stop_reason or run.ended_by,
                "rules": outputs(counters),
            }
        finally:
            filesystems.close()


class _CleaningRun(Struct):
    cleaner: Cleaner
    request: CleaningRequest
    throttle: Throttle
    filesystems: Filesystems
    usage: FileUsage
    target_filesystems: FilesystemSearch | None
    gone: set[Inode] = field(default_factory=set)  # entries deleted by earlier rules of a trial run
    files: int = 0
    bytes: int = 0
    ended_by: Reason | None = None  # reason of the last rule that ended early

    def run_rule(self, rule: CleaningRule) -> RuleCounters:
        counters = RuleCounters(checkpoints=0 if rule.kind is EntryKind.CHECKPOINTS else None)
        if self.throttle.stop_reason is None:
            state_dir = self.cleaner.state_dir
            protected = inode_at(state_dir) if state_dir is not None else None
            min_age = rule.min_age.total_seconds()
            watch = ReadWatch(min_age, self.throttle)
            cutoff_ns = round((self.cleaner.clocks.now() - min_age) * 1e9)
            with opened_roots(rule.roots, self.cleaner.cleaning.owners, protected) as opened:
                rule_run = _RuleRun(self, rule, counters, watch, cutoff_ns)
                try:
                    rule_run.apply(opened)
                except OSError as error:  # such as of reading the free space, without which nothing more is deleted
                    log.warning("cleaning ends early", extra={"rule": rule.name, "reason": str(error)})
                    rule_run.end(Reason.of(error))
        return counters


class _RuleRun(Struct):
    run: _CleaningRun
    rule: CleaningRule
    counters: RuleCounters
    watch: ReadWatch
    cutoff_ns: int
    """Nanoseconds since the epoch; entries used later are too young."""
    considered: int = 0
    """Matched entries deleted or left for a reason of their own."""

    def apply(self, opened: OpenedRoots) -> None:
        self.counters.refused_roots.update(opened.refused)
        measured = tuple(root for root in opened.roots if self._accept(root) and self._measure(root))
        roots = tuple(root for root in measured if self._needs_space(root))
        self.counters.free_enough_roots.extend(root.path for root in measured if root not in roots)
        if measured and not roots:
            self.run.ended_by = Reason.FREE_ENOUGH
        if self.rule.age_by is AgeBy.USED:
            roots = tuple(self._with_access_times(root) for root in roots)
        with closing(self.watch):
            clean = self._clean_files if self.rule.kind is EntryKind.FILES else self._clean_checkpoints
            ended_by = clean(roots)
        ended_by = ended_by or self.run.throttle.stop_reason
        if ended_by is not None:
            self.end(ended_by)

    def end(self, reason: Reason) -> None:
        self.run.ended_by = reason
        self.counters.leave_rest(reason, self.counters.matched - self.considered)

    def _accept(self, root: Root) -> bool:
        """Return False, and record the refusal, if the root is not on a file system that the command names."""
        search = self.run.target_filesystems
        if search is None or search.finds(root.mount):
            return True
        names = ", ".join(str(name) for name in search.names[:_SHOWN_NAMES])
        self.counters.refused_roots[root.path] = f"{root.path} does not lie on {printable(names)}"
        return False

    def _measure(self, root: Root) -> bool:
        """Measure the root's free space; refuse the root if that fails."""
        try:
            self.run.filesystems.add(root)
        except OSError as error:
            self.counters.refused_roots[root.path] = f"{root.path}: its free space cannot be read: {error.strerror}"
            return False
        return True

    def _with_access_times(self, root: Root) -> Root:
        sees_all = self.run.usage.sees_every_process()
        times = access_times(root.mount, Path(self.run.cleaner.proc), sees_every_process=sees_all)
        self.counters.access_times[root.path] = str(times)
        if times.untraced:
            log.warning(
                "access times unreliable; ages count from the last change",
                extra={"rule": self.rule.name, "root": root.path, "reason": ", ".join(times.untraced)},
            )
        return replace(root, access_times=times)

    def _needs_space(self, root: Root) -> bool:
        limit = self.rule.when_free_below
        if limit is not None and self.run.filesystems.space(root.device).percent >= limit:
            return False
        return not self.run.filesystems.wait_for_enough(root.device)

    def _clean_files(self, roots: tuple[Root, ...]) -> Reason | None:
        """Return why the rule ended early, if so."""
        run = self.run
        search = FileSearch(
            self.rule, roots, self.cutoff_ns, run.throttle, self.counters, run.gone, run.cleaner.batch_size
        )
        remover = FileRemover(run.usage, self.rule.age_by, self.cutoff_ns, run.request.dry_run)
        enough: set[int] = set()
        with closing(_DirectoryCache()) as parents:
            for batch in search.batches(enough):
                self.watch.watch_files(batch)
                for file in batch:
                    device = file.directory.root.device
                    if device in enough or run.filesystems.wait_for_enough(device):
                        enough.add(device)
                        if enough.issuperset(root.device for root in roots):
                            return Reason.FREE_ENOUGH
                        continue
                    if not run.throttle.may_continue():
                        return run.throttle.stop_reason
                    if self._files_left() < 1:
                        return Reason.LIMIT_FILES
                    self.considered += 1
                    self._remove(file, remover, parents)
        return Reason.FREE_ENOUGH if enough else None

    def _remove(self, file: MatchedFile, remover: FileRemover, parents: _DirectoryCache) -> None:
        outcome: int | Reason
        if file.stored > self._bytes_left():
            outcome = Reason.LIMIT_BYTES
        elif (obstacle := self.watch.obstacle(file.directory)) is not None:
            outcome = obstacle
        else:
            try:
                parent = parents.fd_of(file.directory)
            except OSError as error:
                outcome = Reason.of(error)
            else:
                outcome = self._free(remover, parent, file)
                self.watch.ignore(file.directory, file.name)
        if isinstance(outcome, Reason):
            if outcome is Reason.MOVED:
                parents.forget(file.directory)
            self.counters.leave(outcome, file.directory, file.name)
            return
        self._count(file.directory, 1, outcome)
        # Only later rules read this, and a million inodes need memory.
        if self.run.request.dry_run and len(self.run.request.rules) > 1:
            self.run.gone.add(file.inode)

    def _free(self, remover: FileRemover, parent: int, file: MatchedFile) -> int | Reason:
        if self.rule.keep_tail is not None:
            return remover.shrink(parent, file, self.rule.keep_tail)
        if self.rule.do is CleaningOperation.TRUNCATE:
            return remover.truncate(parent, file)
        return remover.delete(parent, file)

    def _clean_checkpoints(self, roots: tuple[Root, ...]) -> Reason | None:
        run = self.run
        with closing(MetadataReader()) as metadata:
            search = CheckpointSearch(
                self.rule, roots, self.cutoff_ns, run.throttle, self.counters, run.gone, metadata=metadata
            )
            matched = search.find()
        remover = CheckpointRemover(run.usage, run.throttle, self.rule.age_by, self.cutoff_ns, run.request.dry_run)
        ended_by = None
        self.watch.watch_checkpoints(matched)
        for checkpoint in matched:
            if not run.throttle.may_continue():
                return run.throttle.stop_reason
            self.considered += 1
            if run.filesystems.wait_for_enough(checkpoint.directory.root.device):
                reason: Reason | None = Reason.FREE_ENOUGH
                ended_by = Reason.FREE_ENOUGH
            else:
                reason = self._remove_checkpoint(checkpoint, remover)
            if reason is not None:
                self.counters.leave(reason, checkpoint.directory, "")
        return ended_by

    def _remove_checkpoint(self, checkpoint: MatchedCheckpoint, remover: CheckpointRemover) -> Reason | None:
        if checkpoint.contents.files > self._files_left():
            return Reason.LIMIT_FILES
        if checkpoint.contents.bytes > self._bytes_left():
            return Reason.LIMIT_BYTES
        if (obstacle := self.watch.obstacle(checkpoint.directory)) is not None:
            return obstacle
        removal = remover.delete(checkpoint)
        self._count(checkpoint.directory, removal.files, removal.bytes)
        if removal.reason is None:
            self.counters.checkpoints = (self.counters.checkpoints or 0) + 1
            if self.run.request.dry_run:
                self.run.gone.add(checkpoint.inode)
        return removal.reason

    def _count(self, directory: WalkedDirectory, files: int, size: int) -> None:
        self.counters.files += files
        self.counters.bytes += size
        self.run.files += files
        self.run.bytes += size
        self.run.filesystems.count_freed(directory.root.device, size)

    def _files_left(self) -> int:
        limits = ((self.run.cleaner.cleaning.max_files, self.run.files), (self.rule.max_files, self.counters.files))
        return _least_left(*limits)

    def _bytes_left(self) -> int:
        limits = ((self.run.cleaner.cleaning.max_bytes, self.run.bytes), (self.rule.max_bytes, self.counters.bytes))
        return _least_left(*limits)


def _least_left(*limits: tuple[int | None, int]) -> int:
    return min((limit - used for limit, used in limits if limit is not None), default=_UNLIMITED)


class _DirectoryCache:
    def __init__(self) -> None:
        self._fds: OrderedDict[WalkedDirectory, int] = OrderedDict()

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def fd_of(self, directory: WalkedDirectory) -> int:
        """Return a descriptor that the cache owns. Raises OSError."""
        if directory in self._fds:
            self._fds.move_to_end(directory)
            return self._fds[directory]
        fd = directory.reopen()
        self._fds[directory] = fd
        if len(self._fds) > _OPEN_DIRECTORIES:
            os.close(self._fds.popitem(last=False)[1])
        return fd

    def forget(self, directory: WalkedDirectory) -> None:
        os.close(self._fds.pop(directory))
