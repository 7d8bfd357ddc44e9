"""Files opened with the rights of the users who placed or named them.

The path is walked with the rights of the first user who owns a directory on it, or of the one who named the file. Each
further user who could have placed something on the path, or named the file, must be able to reach the same file. So no
user can read another's file through a log, even if it is moved or replaced during the walk.

Paths controlled by administrators alone are opened with this process's rights. Without CAP_SETUID and CAP_SETGID, file
modes are compared instead (`Rights.may`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise

from msgspec import Struct

from trainmedic_agent.log_opening.node_files import (
    FileFacts,
    Listing,
    LogRefused,
    NamedBy,
    UnreadReason,
    check_readable,
    parts_of,
)
from trainmedic_agent.log_opening.own_files import DIRECTORY, ENTRY, READ, facts_at, listed, reopened
from trainmedic_agent.log_opening.placement import PathStep, placers
from trainmedic_agent.log_opening.rights import ANYONE, Rights, UserDatabase, has_acl
from trainmedic_agent.log_opening.thread_rights import ThreadRights

_MOST_USERS = 8  # paths with more are refused
_POD_VOLUMES = "/var/lib/kubelet/pods"


class _Bound(Struct, frozen=True):
    """A user who must be able to walk the path from component number `begin` on."""

    rights: Rights
    begin: int


class _OpenedPath:
    """The opened components, from the root on."""

    def __init__(self, steps: list[PathStep], bounds: list[_Bound], user: Rights | None) -> None:
        self.steps = steps
        self.bounds = bounds
        self.user = user  # opens the next component; None for this process

    @property
    def end(self) -> PathStep:
        return self.steps[-1]

    def bind(self, rights: Rights, begin: int) -> None:
        """Add a user. Raises PermissionError if there are too many."""
        if any(bound.rights == rights and bound.begin <= begin for bound in self.bounds):
            return
        if len(self.bounds) == _MOST_USERS:
            raise PermissionError(errno.EACCES, "too many users can have placed what is there", self.end.name)
        self.bounds.append(_Bound(rights, begin))
        if self.user is None and rights.uid is not None:
            self.user = rights


class GuardedFiles:
    def __init__(
        self,
        tops: Sequence[str],
        users: UserDatabase | None = None,
        *,
        switch: ThreadRights | None = None,
        own_uid: int | None = None,
    ) -> None:
        """`tops`: the policy's paths. Without `switch`, file modes are compared."""
        self._tops = tuple(tops)
        self._users = users if users is not None else UserDatabase()
        self._switch = switch
        self._own_uid = own_uid if own_uid is not None else os.geteuid()

    @property
    def takes_rights(self) -> bool:
        return self._switch is not None

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        with self._opened_path(path, named_by) as opened:
            check_readable(opened.end.facts.st_mode, opened.end.facts.st_nlink)
            return self._open_end(opened, READ)

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        with self._opened_path(path, named_by, is_directory=True) as opened:
            fd = self._open_end(opened, READ | os.O_DIRECTORY)
            try:
                with self._acting_as(opened.user):
                    return listed(fd, most)
            finally:
                os.close(fd)

    def facts(self, path: str, names: Sequence[str], named_by: NamedBy | None = None) -> list[FileFacts | None]:
        with self._opened_path(path, named_by, is_directory=True) as opened:
            for bound in opened.bounds:
                self._check(opened, bound, os.X_OK)
            with self._acting_as(opened.user):
                _check_entered(opened.end)
                return [facts_at(opened.end.fd, name) for name in names]

    # --- walking ---

    @contextmanager
    def _opened_path(self, path: str, named_by: NamedBy | None, *, is_directory: bool = False) -> Iterator[_OpenedPath]:
        with ExitStack() as stack:
            rights = self._rights_of_namer(named_by, path) if named_by is not None else ()
            yield self._walk(path, rights, stack, is_directory=is_directory)

    def _walk(self, path: str, rights: Sequence[Rights], stack: ExitStack, *, is_directory: bool) -> _OpenedPath:
        names = self._allowed_parts(path)
        opened = _OpenedPath([_step("/", os.open("/", DIRECTORY), stack)], [], None)
        for each in rights:
            opened.bind(each, 0)
        for number, name in enumerate(names):
            is_end = number == len(names) - 1
            self._bind_owner(opened, number)
            with self._acting_as(opened.user):
                fd = os.open(name, ENTRY if is_end and not is_directory else DIRECTORY, dir_fd=opened.end.fd)
            parent, child = opened.end, _step(name, fd, stack)
            if (others := placers(parent, child, self._users)) is not None:
                opened.bind(others, number)
            opened.steps.append(child)
        if is_directory:
            self._bind_owner(opened, len(names))
        return opened

    def _bind_owner(self, opened: _OpenedPath, number: int) -> None:
        uid = opened.steps[number].facts.st_uid
        if uid not in {0, self._own_uid}:
            opened.bind(self._users.rights_of(uid), number)

    def _rights_of_namer(self, named_by: NamedBy, path: str) -> list[Rights]:
        """Return the rights of the users who could have placed or own a naming file.

        If root owns the file or a directory of the job, root of any container may have created it, so outside of the
        job's directory only files that anyone may read are allowed.
        """
        job_directory = self._job_directory(named_by.path)
        with self._opened_path(named_by.path, None) as opened:
            facts = opened.end.facts
            if (facts.st_dev, facts.st_ino) != (named_by.device, named_by.inode):
                raise FileNotFoundError(errno.ENOENT, "the file that names it has changed", path)
            rights = [bound.rights for bound in opened.bounds]
            is_of_root = any(step.facts.st_uid == 0 for step in opened.steps[len(parts_of(job_directory)) :])
        if is_of_root and not path.startswith(f"{job_directory}/"):
            rights.append(ANYONE)
        if facts.st_uid not in {0, self._own_uid}:
            rights.insert(0, self._users.rights_of(facts.st_uid))  # first, so that they open the path
        return rights

    def _job_directory(self, path: str) -> str:
        """Return the path's directory directly below a policy path or the pods' volumes."""
        tops = [_POD_VOLUMES, *sorted(self._tops, key=len, reverse=True)]
        top = next((top for top in tops if path.startswith(f"{top}/")), path)
        return f"{top}/{path[len(top) + 1 :].split('/', 1)[0]}"

    def _allowed_parts(self, path: str) -> list[str]:
        names = parts_of(path)
        if not any(path == top or path.startswith(f"{top}/") for top in self._tops):
            raise LogRefused(UnreadReason.OUTSIDE)
        return names

    # --- rights ---

    def _acting_as(self, user: Rights | None) -> AbstractContextManager[None]:
        return nullcontext() if user is None or self._switch is None else self._switch.using(user)

    def _open_end(self, opened: _OpenedPath, flags: int) -> int:
        for bound in opened.bounds:
            self._check(opened, bound, os.R_OK)
        with self._acting_as(opened.user):
            return reopened(opened.end.fd, flags)

    def _check(self, opened: _OpenedPath, bound: _Bound, wanted: int) -> None:
        """Raise OSError if a user cannot walk to the end, or use it as `wanted`."""
        steps = opened.steps[bound.begin :]
        # Without a uid, the thread becomes nobody, who may own the file: compare modes too.
        if self._switch is None or bound.rights.uid is None:
            for step in steps:
                needed = wanted if step is opened.end else os.X_OK
                if not bound.rights.may(needed, step.facts, has_acl=has_acl(step.fd)):
                    raise PermissionError(errno.EACCES, "a user who placed or named it may not read it", step.name)
        if self._switch is None or bound.rights == opened.user:
            return
        with self._switch.using(bound.rights):
            for parent, child in pairwise(steps):
                _check_same(parent, child)
            if wanted == os.X_OK:
                _check_entered(opened.end)
            else:
                os.close(reopened(opened.end.fd, READ))


def _step(name: str, fd: int, stack: ExitStack) -> PathStep:
    stack.callback(os.close, fd)
    return PathStep(name, fd, os.fstat(fd))


def _check_entered(directory: PathStep) -> None:
    os.close(os.open(".", DIRECTORY, dir_fd=directory.fd))


def _check_same(parent: PathStep, child: PathStep) -> None:
    """Raise OSError if the calling thread cannot take the step."""
    fd = os.open(child.name, ENTRY, dir_fd=parent.fd)
    try:
        if not os.path.samestat(os.fstat(fd), child.facts):
            raise FileNotFoundError(errno.ENOENT, "another file has taken its place", child.name)
    finally:
        os.close(fd)
