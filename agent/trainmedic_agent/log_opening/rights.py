"""Users and groups as whom a file is opened, with the groups that the node's databases know."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import threading
import time
from collections.abc import Callable

from msgspec import Struct

NOBODY_ID = 65534
_LAST_SYSTEM_ID = 999
_USERS_GROUP = 100
"""The group ``users``, which some distributions give to every user."""
_KNOWN_SECONDS = 300.0
_MOST_KNOWN = 10_000
_WITHOUT_ACL = frozenset((errno.ENODATA, errno.EOPNOTSUPP))


class Rights(Struct, frozen=True):
    """The user and groups as whom a file is opened."""

    uid: int | None
    """None: any user. Such rights never count as those of a file's owner."""
    gid: int
    groups: tuple[int, ...] = ()

    def may(self, wanted: int, facts: os.stat_result, *, has_acl: bool) -> bool:
        """Return whether the file's mode grants `wanted`, an ``os.R_OK`` or ``os.X_OK``.

        The mode does not describe an access control list, so such a file is granted to its owner only.
        """
        mode = facts.st_mode
        if self.uid is not None and facts.st_uid == self.uid:
            return bool(mode >> 6 & wanted)
        if has_acl:
            return False
        if facts.st_gid == self.gid or facts.st_gid in self.groups:
            return bool(mode >> 3 & wanted)
        return bool(mode & wanted)


ANYONE = Rights(None, NOBODY_ID)
"""The rights that every user has."""


def of_group(gid: int) -> Rights:
    """Return the rights that every member of a group has."""
    return Rights(None, gid)


class UserDatabase:
    """The node's users and groups. Answers are kept for five minutes. Several threads use it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._users: dict[int, tuple[float, Rights]] = {}

    def rights_of(self, uid: int) -> Rights:
        """Return the rights of a user. A user without an entry has no group: the group of a file proves none, since a
        directory can pass its own group on."""
        now = self._monotonic()
        with self._lock:
            known = self._users.get(uid)
            if known is not None and now - known[0] < _KNOWN_SECONDS:
                return known[1]
        rights = _rights_of(uid)
        with self._lock:
            if len(self._users) >= _MOST_KNOWN:
                self._users.clear()
            self._users[uid] = (now, rights)
        return rights

    def is_shared(self, gid: int, owner: int) -> bool:
        """Return whether users other than `owner` can be in a group. Groups of the system have no such users, nor has
        a user's private group."""
        if gid <= _LAST_SYSTEM_ID and gid != _USERS_GROUP:
            return False
        try:
            user, group = pwd.getpwuid(owner), grp.getgrgid(gid)
        except (KeyError, OSError):
            return True
        is_private = user.pw_gid == gid and user.pw_name == group.gr_name
        return not is_private or not {user.pw_name}.issuperset(group.gr_mem)


def _rights_of(uid: int) -> Rights:
    try:
        user = pwd.getpwuid(uid)
        return Rights(uid, user.pw_gid, tuple(os.getgrouplist(user.pw_name, user.pw_gid)))
    except (KeyError, OSError):
        return Rights(uid, NOBODY_ID)


def has_acl(fd: int) -> bool:
    """Return whether the file of an ``O_PATH`` descriptor can have an access control list. True if unknown."""
    try:
        os.getxattr(f"/proc/self/fd/{fd}", "system.posix_acl_access")
    except OSError as error:
        return error.errno not in _WITHOUT_ACL
    return True
