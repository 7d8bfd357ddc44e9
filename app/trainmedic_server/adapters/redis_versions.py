"""Which versions of Redis and Valkey lack published security fixes.

Redis numbers its fixes by branch: 6.2.23 has those of the branch 6.2. The numbers here are the lowest patch release of
each branch with every fix that was published by September 2026. Redis: the security releases of 24 July, 17 August and
18 September 2026, which github.com/redis/redis/releases lists. Valkey: those of 21 July 2026, by
github.com/valkey-io/valkey/releases. Whoever raises them names the release here.

A distribution may put the fixes into an older version and keep its number, as Debian and Ubuntu do; the number alone
does not tell. Who calls it: ``embedded_redis``, about the program that it has started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIXED: Mapping[str, Mapping[tuple[int, int], int]] = {
    "Redis": {(6, 2): 23, (7, 2): 15, (7, 4): 11, (8, 2): 10, (8, 4): 6, (8, 6): 7, (8, 8): 3, (8, 10): 2},
    "Valkey": {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1},
}
_VERSION = re.compile(r"(?P<product>Redis|Valkey) server v=(?P<major>\d+)\.(?P<minor>\d+)\.(?P<patch>\d+)")


def missing_fixes(version_line: str) -> str:
    """What the program lacks that prints this for ``--version``, as half a sentence; empty where it lacks nothing.

    Of a branch that is newer than those that are known, and of a program that says something else, nothing is known.
    """
    parsed = _VERSION.match(version_line)
    if parsed is None:
        return ""
    product = parsed["product"]
    major, minor, patch = (int(parsed[name]) for name in ("major", "minor", "patch"))
    fixed = _FIXED[product]
    version = f"{product} {major}.{minor}.{patch}"
    if (major, minor) > max(fixed):
        return ""
    if (major, minor) not in fixed:
        return f"{version} is of a branch that gets no security fixes"
    if patch < fixed[major, minor]:
        return f"{version} lacks published security fixes, which {major}.{minor}.{fixed[major, minor]} has"
    return ""
