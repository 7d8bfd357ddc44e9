"""A user of the node who wants the cleaner to delete what lies outside its roots: exchanges names as fast as it can.

Each line of its input is the number of an attack and a directory; it answers with a line when it is at it,
and goes on until the next line. Below that directory it works on pairs of names: something that is being
cleaned, and a symbolic link to a canary or another directory. A pair is exchanged in one step (renameat2 with
RENAME_EXCHANGE), so that the name always means the one or the other. Moves carry a directory away and back.

No attack exchanges both a directory and something in it: by the link it would reach the canaries itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
from dataclasses import dataclass
from pathlib import Path

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2

_DELETING = "root/run/.trainmedic-deleting-checkpoint"


@dataclass(frozen=True)
class Attack:
    pairs: tuple[tuple[str, str], ...] = ()
    moves: tuple[tuple[str, str], ...] = ()


# A checkpoint that is changed while it is looked through is left; so it is gone for when it is being deleted.
ATTACKS = (
    Attack(pairs=(("root/a", "links/a"), ("root/run", "links/run"))),
    Attack(
        pairs=(
            ("root/a/b", "links/b"),
            ("root/run/checkpoint-1", "links/checkpoint-1"),
            (f"{_DELETING}-1", "links/checkpoint-1"),
            (f"{_DELETING}-2/ranks", "links/ranks"),
        )
    ),
    Attack(
        pairs=(
            ("root/a/b/c", "links/c"),
            ("root/a/b/f1", "links/f1"),
            (f"{_DELETING}-1/ranks/1", "links/1"),
            (f"{_DELETING}-2/model.pt", "links/model.pt"),
        )
    ),
    Attack(
        pairs=(("root/a/b", "root/a/d"), ("root/a/f1", "links/f1")),
        moves=(("root/a/b/c", "elsewhere/c"), (f"{_DELETING}-1/ranks", "elsewhere/ranks"), ("root", "elsewhere/root")),
    ),
)
_TURNS = 5
"""Exchanges between two looks at the input."""


def main() -> None:
    exchange = ctypes.CDLL(None).renameat2
    while line := sys.stdin.readline():
        number, _, base = line.rstrip("\n").partition(" ")
        attack = ATTACKS[int(number)]
        os.chdir(base)
        pairs = [(first.encode(), second.encode()) for first, second in attack.pairs]
        print(flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            for first, second in pairs * _TURNS:
                # There and back, so that the cleaner finds things in their places often enough to go on.
                exchange(_HERE, first, _HERE, second, _EXCHANGE)
                exchange(_HERE, first, _HERE, second, _EXCHANGE)
            for here, there in attack.moves:
                with contextlib.suppress(OSError):
                    Path(here).rename(there)
                    Path(there).rename(here)


if __name__ == "__main__":
    main()
