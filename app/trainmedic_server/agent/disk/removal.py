"""Deleting or emptying one file, after making sure, at the last moment, that it is still the one that was chosen.

The file is opened by its name in its open directory, following no link, and compared: device and inode, a
regular file, one name, as old as it was, and nobody uses it (`holders`). Then the name is taken away in
that same directory. Linux cannot delete "what this descriptor has open", so between the last look and the
deletion some microseconds remain in which somebody who may write in that directory can put another file
under the name; never can it be one outside the directory that was opened.

**Truncating** a log that nobody has open, or whose writers all append, sets its length to 0. A writer that
does not append would go on at its old place and leave zeros before it, and so would one that cannot be
seen; in such a file a hole is punched instead: it keeps its length, the space of its whole blocks is given
back, what is written meanwhile is kept, and the writer notices nothing. What the log held is lost either way.

A trial run makes the same checks, and those of the permissions besides.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from trainmedic_server.agent.disk import kernel, reasons
from trainmedic_server.agent.disk.ages import stamp_of
from trainmedic_server.agent.disk.holders import Holders
from trainmedic_server.agent.disk.reasons import Reason
from trainmedic_server.agent.disk.rules import AgeBy

_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
STORED = 512
"""Bytes in the unit of ``st_blocks``."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A file as it was when it was chosen: `device` and `inode`, and the time from which its age counts."""

    name: str
    device: int
    inode: int
    stamp: int


@dataclass(frozen=True, slots=True)
class Remover:
    """Deletes and empties files, or, in a trial run, says what would happen."""

    holders: Holders
    dry_run: bool

    def delete(self, parent: int, chosen: Chosen, age_by: AgeBy) -> int | Reason:
        """The bytes that the deletion frees, or why the file was left. `parent` is its open directory."""
        fd: int | None = None
        try:
            facts = os.stat(chosen.name, dir_fd=parent, follow_symlinks=False)
            if (reason := _differs(facts, chosen)) is not None:
                return reason
            if stamp_of(facts, age_by) != chosen.stamp:
                return Reason.CHANGED
            fd = _opened(parent, chosen.name)
            if fd is not None and not os.path.samestat(os.fstat(fd), facts):
                return Reason.CHANGED
            if (reason := self.holders.user_of(fd, (facts.st_dev, facts.st_ino))) is not None:
                return reason
            if self.dry_run:
                return refusal(parent, facts, fd) or facts.st_blocks * STORED
            os.unlink(chosen.name, dir_fd=parent)
            return facts.st_blocks * STORED
        except OSError as error:
            return reasons.of(error)
        finally:
            if fd is not None:
                os.close(fd)

    def truncate(self, parent: int, chosen: Chosen, age_by: AgeBy, youngest: int) -> int | Reason:
        """The bytes that emptying the file frees, or why it was left.

        It may have been written since it was chosen, but has to be at least as old as `youngest` says.
        """
        fd = None
        try:
            # Not opened for writing before it is known to be a file.
            if (reason := _differs(os.stat(chosen.name, dir_fd=parent, follow_symlinks=False), chosen)) is not None:
                return reason
            fd = os.open(chosen.name, os.O_WRONLY | _PLAIN, dir_fd=parent)
            facts = os.fstat(fd)
            if (reason := _differs(facts, chosen)) is not None:
                return reason
            if stamp_of(facts, age_by) > youngest:
                return Reason.YOUNG
            return self._emptied(fd, facts)
        except OSError as error:
            return reasons.of(error)
        finally:
            if fd is not None:
                os.close(fd)

    def _emptied(self, fd: int, facts: os.stat_result) -> int | Reason:
        stored = facts.st_blocks * STORED
        if self._may_be_cut(fd, facts):
            if not self.dry_run:
                os.ftruncate(fd, 0)
            return stored
        whole = facts.st_size // facts.st_blksize * facts.st_blksize
        if not whole:
            return Reason.EMPTY
        if self.dry_run:
            return max(0, stored - (facts.st_blksize if facts.st_size > whole else 0))
        kernel.punch_hole(fd, whole)
        return max(0, stored - os.fstat(fd).st_blocks * STORED)

    def _may_be_cut(self, fd: int, facts: os.stat_result) -> bool:
        try:
            if kernel.lease(fd):
                return True
        except OSError:  # no leases here
            pass
        return self.holders.all_writers_append((facts.st_dev, facts.st_ino))


def refusal(parent: int, facts: os.stat_result, fd: int | None) -> Reason | None:
    """Why the system would not let this process take a name out of the directory `parent`; None where it would."""
    directory = os.fstat(parent)
    if os.fstatvfs(parent).f_flag & os.ST_RDONLY:
        return Reason.READ_ONLY
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=parent, effective_ids=True):
        return Reason.NOT_PERMITTED
    own = os.geteuid()
    if directory.st_mode & stat.S_ISVTX and own not in (0, directory.st_uid, facts.st_uid):
        return Reason.NOT_PERMITTED
    if kernel.is_unchangeable(parent) or (fd is not None and kernel.is_unchangeable(fd)):
        return Reason.NOT_PERMITTED
    return None


def _opened(parent: int, name: str) -> int | None:
    """The file, open for reading; None where that is not permitted. Raises OSError."""
    try:
        return os.open(name, os.O_RDONLY | _PLAIN, dir_fd=parent)
    except PermissionError:
        return None


def _differs(facts: os.stat_result, chosen: Chosen) -> Reason | None:
    """Why this is not the file that was chosen, or not to be touched any more."""
    if (facts.st_dev, facts.st_ino) != (chosen.device, chosen.inode) or not stat.S_ISREG(facts.st_mode):
        return Reason.CHANGED
    return Reason.HARD_LINK if facts.st_nlink > 1 else None
