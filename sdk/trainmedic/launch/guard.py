"""The process between ``trainmedic-run`` and a job: whatever becomes of either, no process of the job stays.

It is run as a program by its path, and imports nothing but the standard library. It is the reaper of the job's
orphans, so that all of the job's processes stay below it, whatever sessions they open; the first of them is the
**child**. It reads orders from its lifeline, a pipe whose other end only ``trainmedic-run`` has: ``end <signal>``
gives the child that signal, and after the grace SIGKILL to all of them. Where the lifeline closes, because
``trainmedic-run`` was killed, it ends them by SIGTERM in the same way. When the child has ended, whoever is left of the
job is ended too, and the child's wait status is written to the report pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.05
_LONGEST_GRACE_FOR_REST = 5.0
"""Seconds that processes have which outlive the child: it has ended, so their work is over."""


def set_subreaper() -> None:
    """Make this process the parent of its orphaned descendants. Does nothing where the system cannot (not Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """The processes below `root`, zombies left out, by what ``/proc`` says."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (directory / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(directory.name))
    below: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        below += level
    return below


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            os.kill(pid, number)


class Guard:
    """Guards one child."""

    def __init__(self, argv: list[str], lifeline: int, grace: float) -> None:
        self._lifeline = lifeline
        self._grace = grace
        self._orders = b""
        self._end_at: float | None = None  # when SIGKILL is due
        self._status: int | None = None
        own = os.getpid()

        def die_with_guard() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != own:
                os._exit(127)

        # One that can be ended by signals that this process ignores.
        self.child = subprocess.Popen(argv, preexec_fn=die_with_guard)  # noqa: S603 - the user's own command

    def run(self) -> int:
        """Guard until nothing of the job is left; return the child's wait status."""
        while True:
            readable, _, _ = select.select([self._lifeline] if self._lifeline >= 0 else [], [], [], _LOOK_SECONDS)
            if readable:
                self._obey()
            self._reap()
            if self._status is not None:
                self._end_rest()
                return self._status
            if self._end_at is not None and time.monotonic() >= self._end_at:
                signal_all(descendants(os.getpid()), signal.SIGKILL)

    def _obey(self) -> None:
        received = os.read(self._lifeline, 4096)
        if not received:
            os.close(self._lifeline)
            self._lifeline = -1
            self._end_all(signal.SIGTERM)
        *lines, self._orders = (self._orders + received).split(b"\n")
        for line in lines:
            if line.startswith(b"end "):
                self._end_all(int(line[4:]))

    def _end_all(self, number: int) -> None:
        """Let the child end in order first, because it knows how to end the ranks. SIGKILL follows for all."""
        if self._end_at is None:
            self._end_at = time.monotonic() + self._grace
        signal_all([self.child.pid], number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child.pid:
                self._status = status
                self.child.returncode = os.waitstatus_to_exitcode(status)

    def _end_rest(self) -> None:
        """End what has outlived the child."""
        kill_at = time.monotonic() + min(self._grace, _LONGEST_GRACE_FOR_REST)
        signal_all(descendants(os.getpid()), signal.SIGTERM)
        while rest := descendants(os.getpid()):
            if time.monotonic() >= kill_at:
                signal_all(rest, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)
            self._reap()


def main(arguments: list[str]) -> int:
    """``guard.py <lifeline> <report> <grace> <command>...``"""
    lifeline, report, grace = int(arguments[0]), int(arguments[1]), float(arguments[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # handled, and not ignored: the child would inherit that
    set_subreaper()
    os.set_inheritable(lifeline, False)
    os.set_inheritable(report, False)
    try:
        guard = Guard(arguments[3:], lifeline, grace)
    except OSError as error:
        os.write(report, f"failed {error.strerror or error}\n".encode())
        return 127
    os.write(report, f"pid {guard.child.pid}\n".encode())
    status = guard.run()
    os.write(report, f"status {status}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
