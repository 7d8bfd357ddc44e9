"""Users who could have placed an entry in a directory. A file is read only if all of them may read it.

- A directory's owner can rename its entries.
- Users with write access can move files into it that they cannot read, even into sticky directories.
- Moving a directory also requires write access to it.
"""

from __future__ import annotations

import os
import stat

from msgspec import Struct

from trainmedic_agent.log_opening.rights import ANYONE, Rights, UserDatabase, has_acl, of_group


class PathStep(Struct, frozen=True):
    """An opened component of a path, with its `fstat`."""

    name: str
    fd: int
    facts: os.stat_result


def writers(step: PathStep, users: UserDatabase) -> Rights | None:
    """Return the rights common to the users other than the owner who may write to a directory, None without any."""
    mode = step.facts.st_mode
    if mode & stat.S_IWOTH:
        return ANYONE
    if not mode & stat.S_IWGRP:
        return None
    if has_acl(step.fd):
        return ANYONE  # the mode's group bits cover all ACL entries
    gid = step.facts.st_gid
    return of_group(gid) if users.is_shared(gid, step.facts.st_uid) else None


def placers(parent: PathStep, child: PathStep, users: UserDatabase) -> Rights | None:
    """As `writers`, for the users other than both owners who could have placed `child`."""
    others = writers(parent, users)
    if others is None or not stat.S_ISDIR(child.facts.st_mode):
        return others
    movers = writers(child, users)
    return others if movers == ANYONE else movers
