"""Users who can have placed an entry in a directory.

Only the rights of these users count for reading the entry: if any of them may not read a file, he could have moved it
there to see it in a log.

- A directory's owner can rename all that is in it.
- Whoever may write in a directory can move files into it that he may not read. Sticky directories permit that too.
- Moving a directory to another parent takes the right to write in it as well, so its own writers count.

The third rule leaves one way: who may write in a directory without the sticky bit can rename another user's directory
within it. So a name alone gives no job where the directory itself states another one (``log_reading.finders``), and
``trainmedic agent check`` asks for the sticky bit.
"""

from __future__ import annotations

import os
import stat

from msgspec import Struct

from trainmedic_agent.log_opening.rights import ANYONE, Rights, UserDatabase, has_acl, of_group


class WayStep(Struct, frozen=True):
    """One directory or entry on the way to a file, open as an ``O_PATH`` descriptor."""

    name: str
    fd: int
    facts: os.stat_result


def writers(step: WayStep, users: UserDatabase) -> Rights | None:
    """Return the rights that all who may write in a directory have, apart from its owner. None if no other may."""
    mode = step.facts.st_mode
    if mode & stat.S_IWOTH:
        return ANYONE
    if not mode & stat.S_IWGRP:
        return None
    if has_acl(step.fd):
        return ANYONE  # the mode's group bits stand for all entries of the list
    gid = step.facts.st_gid
    return of_group(gid) if users.is_shared(gid, step.facts.st_uid) else None


def placers(parent: WayStep, child: WayStep, users: UserDatabase) -> Rights | None:
    """Return the rights that all who can have placed `child` in `parent` have, apart from the owners of both. None if
    no other can."""
    others = writers(parent, users)
    if others is None or not stat.S_ISDIR(child.facts.st_mode):
        return others
    movers = writers(child, users)
    return others if movers == ANYONE else movers
