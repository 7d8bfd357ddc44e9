"""Files opened with the rights of the users who placed or named them.

The path is walked with the rights of the first user who owns a directory on it. Each further user who could have placed
something on the path, or has named the file, must be able to reach the same file. So no user can read another's file
through a log, even if it is moved or replaced during the walk.

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
from trainmedic_agent.log_opening.placement import WayStep, placers
from trainmedic_agent.log_opening.rights import ANYONE, Rights, UserDatabase, has_acl
from trainmedic_agent.log_opening.thread_rights import ThreadRights

_MOST_USERS = 8
"""Paths with more are refused."""
_POD_VOLUMES = "/var/lib/kubelet/pods"


class _Bound(Struct, frozen=True):
    """A user who must be able to walk the path from this directory number on."""

    rights: Rights
    begin: int


class _Way:
    def __init__(self, steps: list[WayStep], bounds: list[_Bound], user: Rights | None) -> None:
        self.steps = steps
        self.bounds = bounds
        self.user = user
        """User whose rights reached the end. None: this process."""

    @property
    def end(self) -> WayStep:
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
        with self._walked(path, named_by) as way:
            check_readable(way.end.facts.st_mode, way.end.facts.st_nlink)
            return self._opened(way, READ)

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        with self._walked(path, named_by, is_directory=True) as way:
            fd = self._opened(way, READ | os.O_DIRECTORY)
            try:
                with self._as(way.user):
                    return listed(fd, most)
            finally:
                os.close(fd)

    def facts(self, path: str, names: Sequence[str], named_by: NamedBy | None = None) -> list[FileFacts | None]:
        with self._walked(path, named_by, is_directory=True) as way:
            for bound in way.bounds:
                self._check(way, bound, os.X_OK)
            with self._as(way.user):
                _check_entered(way.end)
                return [facts_at(way.end.fd, name) for name in names]

    # --- walking ---

    @contextmanager
    def _walked(self, path: str, named_by: NamedBy | None, *, is_directory: bool = False) -> Iterator[_Way]:
        with ExitStack() as stack:
            rights = self._rights_of_namer(named_by, path) if named_by is not None else ()
            yield self._walk(path, rights, stack, is_directory=is_directory)

    def _walk(self, path: str, rights: Sequence[Rights], stack: ExitStack, *, is_directory: bool) -> _Way:
        names = self._allowed_parts(path)
        way = _Way([_step("/", os.open("/", DIRECTORY), stack)], [], None)
        for each in rights:
            way.bind(each, 0)
        for number, name in enumerate(names):
            is_end = number == len(names) - 1
            self._bind_owner(way, number)
            with self._as(way.user):
                fd = os.open(name, ENTRY if is_end and not is_directory else DIRECTORY, dir_fd=way.end.fd)
            parent, child = way.end, _step(name, fd, stack)
            if (others := placers(parent, child, self._users)) is not None:
                way.bind(others, number)
            way.steps.append(child)
        if is_directory:
            self._bind_owner(way, len(names))
        return way

    def _bind_owner(self, way: _Way, number: int) -> None:
        uid = way.steps[number].facts.st_uid
        if uid not in {0, self._own_uid}:
            way.bind(self._users.rights_of(uid), number)

    def _rights_of_namer(self, named_by: NamedBy, path: str) -> list[Rights]:
        """Return the rights of the users who could have placed or own a naming file.

        If root owns the file or a directory of the job, root of any container may have created it.
        """
        own_place = self._own_place(named_by.path)
        with self._walked(named_by.path, None) as way:
            facts = way.end.facts
            if (facts.st_dev, facts.st_ino) != (named_by.device, named_by.inode):
                raise FileNotFoundError(errno.ENOENT, "the file that names it has changed", path)
            rights = [bound.rights for bound in way.bounds]
            is_of_root = any(step.facts.st_uid == 0 for step in way.steps[len(parts_of(own_place)) :])
        if is_of_root and not path.startswith(f"{own_place}/"):
            rights.append(ANYONE)
        if facts.st_uid not in {0, self._own_uid}:
            rights.insert(0, self._users.rights_of(facts.st_uid))
        return rights

    def _own_place(self, path: str) -> str:
        tops = [_POD_VOLUMES, *sorted(self._tops, key=len, reverse=True)]
        top = next((top for top in tops if path.startswith(f"{top}/")), path)
        return f"{top}/{path[len(top) + 1 :].split('/', 1)[0]}"

    def _allowed_parts(self, path: str) -> list[str]:
        names = parts_of(path)
        if not any(path == top or path.startswith(f"{top}/") for top in self._tops):
            raise LogRefused(UnreadReason.OUTSIDE)
        return names

    # --- rights ---

    def _as(self, user: Rights | None) -> AbstractContextManager[None]:
        return nullcontext() if user is None or self._switch is None else self._switch.using(user)

    def _opened(self, way: _Way, flags: int) -> int:
        for bound in way.bounds:
            self._check(way, bound, os.R_OK)
        with self._as(way.user):
            return reopened(way.end.fd, flags)

    def _check(self, way: _Way, bound: _Bound, wanted: int) -> None:
        """Raise OSError if a user cannot walk to the end."""
        steps = way.steps[bound.begin :]
        if self._switch is None or bound.rights.uid is None:
            for step in steps:
                needed = wanted if step is way.end else os.X_OK
                if not bound.rights.may(needed, step.facts, has_acl=has_acl(step.fd)):
                    raise PermissionError(errno.EACCES, "a user who placed or named it may not read it", step.name)
        if self._switch is None or bound.rights == way.user:
            return
        with self._switch.using(bound.rights):
            for parent, child in pairwise(steps):
                _check_same(parent, child)
            if wanted == os.X_OK:
                _check_entered(way.end)
            else:
                os.close(reopened(way.end.fd, READ))


def _step(name: str, fd: int, stack: ExitStack) -> WayStep:
    stack.callback(os.close, fd)
    return WayStep(name, fd, os.fstat(fd))


def _check_entered(directory: WayStep) -> None:
    os.close(os.open(".", DIRECTORY, dir_fd=directory.fd))


def _check_same(parent: WayStep, child: WayStep) -> None:
    """Raise OSError if the calling thread cannot take the step."""
    fd = os.open(child.name, ENTRY, dir_fd=parent.fd)
    try:
        if not os.path.samestat(os.fstat(fd), child.facts):
            raise FileNotFoundError(errno.ENOENT, "another file has taken its place", child.name)
    finally:
        os.close(fd)
