"""What an attacker of a node knows: where jobs log, what is worth reading there, and how much to write."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from trainmedic.wire.log_layout import AttemptLogs

_MOST_OF_FILE = 4 * 2**20
_HOLE = 2**29


def clear(path: Path) -> None:
    """Remove what is at a path."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def make_directory(path: Path) -> None:
    """Make a directory and those above it, in place of whatever another tactic has put there. Raises OSError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        for each in (path.parent.parent, path.parent, path):
            if each.is_symlink() or not each.is_dir():
                clear(each)
            else:
                with contextlib.suppress(OSError):
                    each.chmod(0o755)
        path.mkdir(parents=True, exist_ok=True)


class Ground(Struct, frozen=True):
    """One attacker's part of the node. Paths are those that this attacker sees, unless they say otherwise."""

    node: str
    name: str
    """Beginning of the names of this attacker's jobs."""
    root: str
    """Directory in which this attacker makes job directories or, with `is_contained`, the job directory itself."""
    seen_root: str
    """The same directory, as the agent sees it."""
    home: str
    """Directory of this attacker outside `root`. The policy allows files that jobs name there."""
    seen_home: str
    """The same directory, as the agent sees it."""
    shared: str
    """Directory in which every user may write and whose files the policy names. Empty if this attacker sees none."""
    team: str
    """Directory that this attacker shares with a victim, who leaves private files there. Empty if there is none."""
    prey: tuple[str, ...]
    """Private files and directories of other users, as the agent sees them."""
    exporter: tuple[str, int] | None
    """Address of the agent's metrics. None if this attacker cannot reach it."""
    links: tuple[str, ...]
    """Sockets of the agent."""
    uid: int
    gid: int
    groups: tuple[int, ...]
    other_uids: tuple[int, ...]
    """Users to whom a root of a container gives files."""
    is_contained: bool = False
    """Whether this attacker is root of a container whose root directory is a job directory of the node."""
    changes_user: bool = True
    """Whether the attacker's process can become `uid`."""
    share: float = 1.0
    """Of the whole load: 0.1 writes a tenth of the files."""

    def count(self, whole: int) -> int:
        """Return this attacker's share of a number."""
        return max(int(whole * self.share), 1)


class Attacker:
    """The tools that tactics share. A tactic is a method that returns within a few seconds."""

    def __init__(self, ground: Ground, rng: random.Random, is_over: Callable[[], bool]) -> None:
        self.ground = ground
        self.rng = rng
        self._is_over = is_over

    def goes_on(self, until: float) -> bool:
        """Return whether it is before `until` by the monotonic clock, and the attack is not over."""
        return time.monotonic() < until and not self._is_over()

    def span(self, most: float = 3.0) -> float:
        """Return the time until which a tactic lasts."""
        return time.monotonic() + self.rng.uniform(0.2, most)

    def job(self, number: int | None = None) -> str:
        """Return the name of one of this attacker's jobs."""
        if self.ground.is_contained:
            return self.ground.name
        return f"{self.ground.name}-{self.rng.randrange(40) if number is None else number}"

    def attempt(self, job: str | None = None, number: int | None = None) -> AttemptLogs:
        """Make the directory of an attempt, as this attacker sees it."""
        number = self.rng.randint(1, 12) if number is None else number
        job = self.job() if job is None else job
        root = Path(self.ground.root)
        logs = (
            AttemptLogs(root / f"attempt-{number}") if self.ground.is_contained else AttemptLogs.of(root, job, number)
        )
        make_directory(logs.path)
        return logs

    def seen(self, path: Path) -> str:
        """Return the path by which the agent sees a file of this attacker."""
        for own, seen in ((self.ground.root, self.ground.seen_root), (self.ground.home, self.ground.seen_home)):
            if path.is_relative_to(own):
                return f"{seen}/{path.relative_to(own)}"
        return str(path)

    def any_name(self, logs: AttemptLogs) -> Path:
        """Return the path of some file that the agent looks for in an attempt."""
        node, rank = self.ground.node, self.rng.randrange(4)
        names = [
            logs.launcher(node),
            logs.records(rank),
            logs.sources(node, rank),
            logs.dump(rank),
            logs.error(node),
            logs.ended(node),
            logs.ranks(node) / "x_1" / "attempt_0" / str(rank) / self.rng.choice(("stdout.log", "stderr.log")),
            logs.launcher(node).with_name(logs.launcher(node).name + self.rng.choice((".1", ".2.gz", "-20260101"))),
            logs.path.parent / "attempts.jsonl",
        ]
        path = self.rng.choice(names)
        make_directory(path.parent)
        return path

    def append(self, path: Path, raw: bytes) -> None:
        """Append to a file, in place of whatever another tactic has put there. Cut a file of 4 MiB to nothing."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o644)
        except OSError:
            clear(path)
            fd = os.open(path, flags, 0o644)
        with open(fd, "ab") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                clear(path)
                return
            file.write(raw)
            if _MOST_OF_FILE < file.tell() < _HOLE:
                file.truncate(0)

    def mark(self) -> str:
        """Return a line that makes a finding, with a number that no victim uses."""
        return f"MARK {self.rng.randrange(10**9, 10**10)} of {self.ground.name}\n"
