"""Tactics that are to use up what reading has: names, entries, bytes, memory, time and findings."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import pickle
import shutil
import socket
import stat
import struct
from pathlib import Path

from tests.support.hostile.ground import Attacker, clear, make_directory

FLOOD = b"step 1: loss 2.0 grad_norm 0.42 lr 1.5e-05 tokens/s 78400 memory 71.2 GB\n" * 200
_TIMES_NS = (0, 1, -1, -(2**62), 2**62, 2**63 - 1, 253402300800 * 10**9, 4 * 10**18, 1_700_000_000 * 10**9)
_F_SETLEASE = 1024


def expanding_dump(groups: int = 4000) -> bytes:
    """Return a pickle of some 90 KB whose groups all have one list of 1,000 ranks: four million members."""
    shared = str(list(range(1000)))
    config = {str(number): {"desc": "x", "ranks": shared} for number in range(groups)}
    return pickle.dumps({"version": "2.9", "pg_config": config, "entries": [], "pg_status": {}})


_EXPANDING = expanding_dump()
_DEEP = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
_SHELL = b"cos\nsystem\n(S'touch /tmp/trainmedic-was-here'\ntR."
_CIRCULAR = b"\x80\x04]\x94" + b"h\x00a" * 10_000 + b"."


class Exhausting(Attacker):
    """Attempts to keep the agent from reading what belongs to others."""

    def names_much(self) -> None:
        """Write sources files that name files in many directories, most of which exist."""
        place = Path(self.ground.home) / "named"
        for _ in range(self.ground.count(50)):
            logs = self.attempt(number=self.rng.randint(1, 40))
            files = []
            for number in range(64):
                path = place / f"{self.rng.randrange(40)}" / f"{number}.log"
                make_directory(path.parent)
                self.append(path, b"x\n")
                files.append({"path": self.seen(path), "source": "training"})
            said = {"version": 1, "job": self.job(), "attempt": 1, "rank": 0, "local_rank": 0, "node": self.ground.node}
            target = logs.sources(self.ground.node, self.rng.randrange(8))
            clear(target)
            target.write_text(json.dumps({**said, "files": files}))

    def says_nonsense(self) -> None:
        """Write sources files that are deep, large, cut, or of wrong types."""
        logs = self.attempt()
        texts = (
            "[" * 60_000,
            '{"a":' * 10_000,
            json.dumps({"node": self.ground.node, "job": "\ud800\x00" * 30, "rank": 10**30, "files": [{}] * 2000}),
            json.dumps({"node": self.ground.node, "job": "x", "rank": 0, "files": [{"path": ["/"] * 100}]}),
            json.dumps({"node": self.ground.node, "job": "x", "rank": True, "attempt": 1e400, "files": 7}),
            '{"rank": ' + "9" * 60_000 + "}",
            "\x00" * 65_536,
        )
        for text in texts:
            with contextlib.suppress(OSError):
                logs.sources(self.ground.node, self.rng.randrange(100)).write_text(text, errors="surrogatepass")

    def makes_crowds(self) -> None:
        """Make empty files by the ten thousand, which all could be logs, and directories in directories."""
        logs = self.attempt(self.job(0), self.rng.randint(1, 2))
        begin, most = self.rng.randrange(max(self.ground.count(100_000) - 10_000, 1)), self.ground.count(100_000)
        until = self.span(4.0)
        for number in range(begin, min(begin + 10_000, most)):
            if not self.goes_on(until):
                return
            with contextlib.suppress(OSError):
                (logs.path / f"rank-{number}.jsonl").touch()
        deep = logs.ranks(self.ground.node)
        for number in range(12):
            deep /= str(number)
            for beside in range(20):
                make_directory(deep / f"{beside}")

    def makes_jobs(self) -> None:
        """Make job directories by the hundred, or attempts if there is one job only."""
        for _ in range(self.ground.count(300)):
            number = self.rng.randrange(self.ground.count(3000))
            logs = self.attempt(f"{self.ground.name}-many-{number}", 1 + number if self.ground.is_contained else 1)
            self.append(logs.launcher(self.ground.node), b"")

    def floods(self) -> None:
        """Append to many logs at once, some of them cut to nothing in between."""
        until = self.span()
        while self.goes_on(until):
            for number in range(self.ground.count(50)):
                path = self.attempt(self.job(number % 40), 1 + number // 40).launcher(self.ground.node)
                self.append(path, FLOOD)

    def floods_findings(self) -> None:
        """Write lines that each make a finding of their own, and blocks of lines that belong together."""
        text = "".join(self.mark() for _ in range(1000))
        block = "Traceback (most recent call last):\n" + '  File "a.py", line 1, in f\n' * 2000
        for _ in range(10):
            path = self.attempt().launcher(self.ground.node)
            self.append(path, (text if self.rng.random() < 0.7 else block).encode())

    def writes_odd_lines(self) -> None:
        """Write lines without end, of no encoding, with control characters, and patterns' worst cases."""
        bad = (
            b"x" * (2 * 2**20),
            b"MARK " * 100_000,
            b"\x00" * 2**20,
            b"\xff\xfe\x80" * 100_000 + b"\n",
            b"\x1b]0;owned\x07\x1b[2J" * 10_000 + b"\n",
            b"[rank0]: " * 50_000 + b"\n",
            b'{"msg": ' * 20_000 + b"\n",
            b"2026-01-01T00:00:00Z " * 20_000 + b"\n",
            b"9999-12-31T23:59:59.999999+14:00 MARK x\n0001-01-01T00:00:00-14:00 MARK y\n" * 1000,
            b"\r" * 2**19 + b"\n",
        )
        for _ in range(4):
            self.append(self.any_name(self.attempt()), self.rng.choice(bad))

    def makes_holes(self) -> None:
        """Make files of a terabyte that take no room, and let them shrink and grow."""
        for _ in range(4):
            path = self.any_name(self.attempt())
            self.append(path, self.mark().encode())
            os.truncate(path, self.rng.choice((2**30, 2**40, 2**43 - 1, 2**20, 0)))
            self.append(path, self.mark().encode())
        self.forgets_holes()

    def forgets_holes(self) -> None:
        """Cut one job's large files, so that the attack does not stand still at their ends."""
        for path in self.attempt(number=1).path.glob("*"):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_size > 2**30:
                    os.truncate(path, 0)

    def packs_bombs(self) -> None:
        """Put packed older parts beside a log, which expand, are cut, or are nothing packed."""
        logs = self.attempt()
        launcher = logs.launcher(self.ground.node)
        self.append(launcher, self.mark().encode())
        bomb = gzip.compress(b"\x00" * (16 * 2**20), 9)
        line = gzip.compress((self.mark() * 100_000).encode(), 9)
        for number in range(2, 20):
            raw = self.rng.choice((bomb * 8, line * 4, bomb[: len(bomb) // 2], b"\x1f\x8b" * 1000, b""))
            packed = launcher.with_name(f"{launcher.name}.{number}.gz")
            clear(packed)
            packed.write_bytes(raw)

    def leaves_dumps(self) -> None:
        """Write flight recorder dumps that expand, nest, run programs, are cut, or are too large."""
        logs = self.attempt()
        make_directory(logs.flight_recorder)
        self.append(logs.launcher(self.ground.node), b"")
        for rank in range(self.ground.count(16)):
            raw = self.rng.choice((_EXPANDING, _DEEP, _SHELL, _CIRCULAR, _EXPANDING[: 1 + self.rng.randrange(90_000)]))
            if self.rng.random() < 0.3:
                changed = bytearray(raw)
                for _ in range(20):
                    changed[self.rng.randrange(len(changed))] = self.rng.randrange(256)
                raw = bytes(changed)
            path = logs.dump(rank)
            clear(path)
            path.write_bytes(raw)
        if self.rng.random() < 0.1:
            clear(logs.dump(99))
            logs.dump(99).write_bytes(b"\x80\x04" + b"\x8e" + struct.pack("<Q", 2**62) + bytes(8 * 2**20))

    def puts_special_files(self) -> None:
        """Put pipes, sockets, directories and, as root of a container, devices where files are looked for."""
        logs = self.attempt()
        for _ in range(8):
            path = self.any_name(logs)
            clear(path)
            kind = self.rng.randrange(4)
            with contextlib.suppress(OSError):
                if kind == 0:
                    os.mkfifo(path, 0o666)
                elif kind == 1:
                    with socket.socket(socket.AF_UNIX) as bound:
                        bound.bind(str(path))
                elif kind == 2:
                    path.mkdir()
                else:
                    major, minor = self.rng.choice(((1, 5), (1, 11), (5, 0), (8, 0)))
                    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))

    def sets_far_times(self) -> None:
        """Set times of files and directories before the epoch, at its end, and beyond."""
        logs = self.attempt()
        for path in (self.any_name(logs), logs.dump(0), logs.path, logs.path.parent):
            at = self.rng.choice(_TIMES_NS)
            with contextlib.suppress(OSError, OverflowError):
                if not path.exists():
                    path.write_text(self.mark())
                os.utime(path, ns=(at, at))

    def uses_odd_names(self) -> None:
        """Use names that are no text, that steer terminals, or that look like others."""
        names = (
            b"\xff\xfe\xe4",
            b"new\nline",
            b"\x1b[2J\x1b]0;x\x07",
            b"%00",
            b"%2E%2E%2F",
            b"x" * 255,
            "‮gnp.bob-1‬".encode(),
            b"bob-1 ",
            b"bob-1%-" + b"0" * 32,
            b"rank-" + b"9" * 200,
            b"attempt-1",
            b"\xff" * 200,
            b".",
        )
        root = os.fsencode(self.ground.root)
        for name in names:
            with contextlib.suppress(OSError):
                attempt = self.rng.choice((b"/attempt-1", b"/attempt-999999999"))
                place = root + b"/" + (b"attempt-3" if self.ground.is_contained else name) + attempt
                os.makedirs(place, exist_ok=True)  # noqa: PTH103
                own = b"launcher-" + os.fsencode(self.ground.node) + b".log"
                for file in (own, name, b"sources-" + name + b"-0.json"):
                    with open(place + b"/" + file, "ab") as opened:  # noqa: PTH123
                        opened.write(self.mark().encode())
        if self.ground.shared:
            for name in names:
                with contextlib.suppress(OSError), open(os.fsencode(self.ground.shared) + b"/" + name, "ab") as opened:  # noqa: PTH123
                    opened.write(self.mark().encode())

    def holds_leases(self) -> None:
        """Hold leases and locks on own logs, so that whoever opens them waits."""
        path = self.attempt().launcher(self.ground.node)
        until = self.span()
        self.append(path, self.mark().encode())
        with path.open("ab") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.fcntl(file, _F_SETLEASE, fcntl.F_WRLCK)
            while self.goes_on(until):
                with contextlib.suppress(OSError):
                    file.write(self.mark().encode())
                    file.flush()
                    os.sched_yield()

    def closes_directories(self) -> None:
        """Change modes and access lists of own files and directories while they are read."""
        logs = self.attempt()
        until = self.span(1.0)
        while self.goes_on(until):
            for path in (logs.path, logs.path.parent, logs.launcher(self.ground.node)):
                with contextlib.suppress(OSError):
                    path.chmod(self.rng.choice((0o000, 0o100, 0o444, 0o700, 0o777)))
            with contextlib.suppress(OSError):
                logs.path.chmod(0o700)
                logs.path.parent.chmod(0o700)

    def vanishes(self) -> None:
        """Remove or rename a job or an attempt while it is read."""
        logs = self.attempt()
        with contextlib.suppress(OSError):
            if self.rng.random() < 0.5:
                other = logs.path.with_name(f"attempt-{self.rng.randint(1, 12)}")
                logs.path.rename(other)
            else:
                shutil.rmtree(logs.path if self.ground.is_contained else logs.path.parent)
