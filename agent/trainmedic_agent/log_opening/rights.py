"""Users' rights to read files."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import threading
import time
from collections.abc import Callable

from msgspec import Struct

NOBODY_ID = 65534  # the user and group nobody
_LAST_SYSTEM_ID = 999  # groups up to this one are assumed to have no ordinary users
_USERS_GROUP = 100  # the group that some distributions give to all users
_KNOWN_SECONDS = 300.0  # for which an entry is used
_MOST_KNOWN = 10_000  # cached users
_WITHOUT_ACL = frozenset((errno.ENODATA, errno.EOPNOTSUPP))


class Rights(Struct, frozen=True):
    uid: int | None  # None: any user but the owner
    gid: int
    groups: tuple[int, ...] = ()

    def may(self, wanted: int, facts: os.stat_result, *, has_acl: bool) -> bool:
        """Return whether the mode grants `wanted`. With an ACL, only to the owner."""
        mode = facts.st_mode
        if self.uid is not None and facts.st_uid == self.uid:
            return bool(mode >> 6 & wanted)
        if has_acl:
            return False
        if facts.st_gid == self.gid or facts.st_gid in self.groups:
            return bool(mode >> 3 & wanted)
        return bool(mode & wanted)


ANYONE = Rights(None, NOBODY_ID)  # the rights that all users have


def of_group(gid: int) -> Rights:
    return Rights(None, gid)


class UserDatabase:
    """Users and groups of the node, cached for five minutes. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._users: dict[int, tuple[float, Rights]] = {}

    def rights_of(self, uid: int) -> Rights:
        """Return a user's rights. A user without an account has no group."""
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
        """Return whether a group may have members other than `owner`; False for system groups."""
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
    """Return whether the file of an ``O_PATH`` descriptor has an ACL; True if unknown."""
    try:
        os.getxattr(f"/proc/self/fd/{fd}", "system.posix_acl_access")
    except OSError as error:
        return error.errno not in _WITHOUT_ACL
    return True
