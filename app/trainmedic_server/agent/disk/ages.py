"""From when the age of a file or directory counts, in nanoseconds since the epoch."""

from __future__ import annotations

import os
import stat

from trainmedic_server.agent.disk.rules import AgeBy


def stamp_of(facts: os.stat_result, age_by: AgeBy) -> int:
    """The time from which the age of a file counts by a rule.

    Of a directory it is its last write, whatever the rule says: looking for files reads it, and changing its
    name changes it.
    """
    if age_by is AgeBy.MODIFIED or stat.S_ISDIR(facts.st_mode):
        return facts.st_mtime_ns
    if age_by is AgeBy.CHANGED:
        return max(facts.st_mtime_ns, facts.st_ctime_ns)
    return max(facts.st_mtime_ns, facts.st_ctime_ns, facts.st_atime_ns)
