"""One attacker as a process: ``python -m tests.support.hostile.program GROUND SEED REPORT``.

The process begins as the user of the tests, loads everything, and then becomes the attacker, who may be unable to read
the program: a user of the node, or root of a container. Of the container, this models the root directory and the
capabilities that runtimes leave by default. It has no namespaces, device rules or seccomp of its own.

Until SIGTERM, tactics follow each other at random. Their counts are in REPORT.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec

from tests.support.hostile.exhausting import Exhausting
from tests.support.hostile.ground import Ground
from tests.support.hostile.stealing import Stealing

_LEFT = (0, 1, 3, 4, 5, 6, 7, 27)
"""Capabilities of a container's root that concern files and users: CHOWN to SETUID, and MKNOD."""
_PR_CAPBSET_DROP = 24
_MOST_CAPABILITIES = 64


class HostileUser(Stealing, Exhausting):
    """All tactics. Each is named by its method."""

    @property
    def tactics(self) -> list[str]:
        """Names of the tactics, sorted, so that a seed repeats their order."""
        bases = (Stealing, Exhausting)
        return sorted(name for base in bases for name in vars(base) if not name.startswith("_") and name != "sources")


def become(ground: Ground) -> None:
    """Become the attacker for good."""
    if not ground.changes_user:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if ground.is_contained:
        os.chroot(ground.seen_root)
    os.chdir("/")
    os.setgroups(ground.groups)
    os.setresgid(ground.gid, ground.gid, ground.gid)
    os.setresuid(ground.uid, ground.uid, ground.uid)
    if ground.uid == 0:
        for number in range(_MOST_CAPABILITIES):
            if number not in _LEFT:
                libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
        mask = sum(1 << number for number in _LEFT)
        header, values = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", mask, mask, 0, 0, 0, 0)
        if libc.capset(header, values) != 0:
            raise OSError(ctypes.get_errno(), "capset")


def main() -> None:
    ground, seed, report = msgspec.json.decode(sys.argv[1], type=Ground), int(sys.argv[2]), Path(sys.argv[3])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # whoever holds a lease gets it when the file is opened
    counts: Counter[str] = Counter()
    with report.open("w") as out:
        become(ground)
        os.umask(0o022)
        attacker = HostileUser(ground, random.Random(seed), stopping.is_set)
        parent = os.getppid()
        while not stopping.is_set() and os.getppid() == parent:
            tactic = attacker.rng.choice(attacker.tactics)
            try:
                getattr(attacker, tactic)()
                counts[tactic] += 1
            except OSError:
                counts[f"{tactic} (refused)"] += 1  # the kernel, or what another tactic has left there
            out.seek(0)
            out.truncate()
            json.dump(counts, out)
            out.flush()
            time.sleep(attacker.rng.uniform(0.0, 0.1))


if __name__ == "__main__":
    main()
