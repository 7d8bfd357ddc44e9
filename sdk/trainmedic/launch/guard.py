"""The process between ``trainmedic-run`` and a job: whatever becomes of either, no process of the job stays.

It is run as a program by its path, and imports nothing but the standard library. It is the reaper of the job's
orphans, so that all of the job's processes stay below it, whatever sessions they open; the first of them is the
**child**. It reads orders from its lifeline, a pipe whose other end only ``trainmedic-run`` has:

- ``end <signal>`` gives the child that signal, and after the grace SIGKILL to all of them.
- ``pass <signal>`` gives the signal to the processes that handle it.

If the lifeline closes because ``trainmedic-run`` was killed, the guard ends the job by SIGTERM in the same way. When
the child has ended, the guard ends the rest of the job and writes the child's wait status to the report pipe.
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
LONGEST_GRACE_FOR_REST = 5.0
"""Seconds that processes have which outlive the child: it has ended, so their work is over."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a job."""
PASSED = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that mean what the job makes of them, such as "save now, the time limit is near"."""
_PASS_AFTER = 0.3
"""Seconds. A scheduler that signals every process of a job step signals this one too, within this time."""
_SAME_SENDING = 5.0
"""Seconds. A signal that this process received so long ago belongs to the order to pass it on."""


def set_subreaper() -> None:
    """Make this process the parent of its orphaned descendants. Does nothing where the system cannot (not Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the processes below `root` by ``/proc``, without zombies."""
    children = _children()
    below: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        below += level
    return below


def _children() -> dict[int, list[int]]:
    """Return the children of each process that has any, without zombies."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (directory / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(directory.name))
    return children


def handlers_of(number: int, root: int) -> list[int]:
    """Return the processes below `root` that catch or block a signal, without those below such a process.

    Any other process would die of SIGUSR1. A process below one that handles the signal, such as a loader worker, can
    have inherited the handler by fork; its parent decides what the signal means. A blocked signal counts, because srun
    blocks its signals and waits for them (``sigwait``).
    """
    bit = 1 << (number - 1)
    children = _children()
    handling: list[int] = []
    level = [root]
    while level:
        below = [child for parent in level for child in children.get(parent, ())]
        masks = {pid: _mask(pid) for pid in below}
        handling += [pid for pid in below if masks[pid] & bit]
        level = [pid for pid in below if not masks[pid] & bit]
    return handling


def _mask(pid: int) -> int:
    """Return the signals that a process catches or blocks, one bit each. 0 if it has ended."""
    mask = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name in ("SigCgt", "SigBlk"):
                mask |= int(value, 16)
    return mask


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            os.kill(pid, number)


class Guard:
    """Guards one child."""

    def __init__(self, argv: list[str], lifeline: int, report: int, grace: float, passed_fd: int = -1) -> None:
        """Start the child. `passed_fd` is a descriptor that the child gets, or -1."""
        self._lifeline = lifeline
        self._grace = grace
        self._orders = b""
        self._end_at: float | None = None  # when SIGKILL is due
        self._status: int | None = None
        self._to_pass: dict[int, float] = {}
        """Signals to pass on, each with the time at which it is due."""
        self._received: dict[int, float] = {}
        """Signals that this process itself received, each with the time of the last one."""
        self._report = report
        own = os.getpid()

        def die_with_guard() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != own:
                os._exit(127)

        # One that can be ended by signals that this process ignores.
        passed = (passed_fd,) if passed_fd >= 0 else ()
        self.child = subprocess.Popen(argv, preexec_fn=die_with_guard, pass_fds=passed)  # noqa: S603 - the user's own command

    def run(self) -> int:
        """Guard until nothing of the job is left; return the child's wait status."""
        while True:
            readable, _, _ = select.select([self._lifeline] if self._lifeline >= 0 else [], [], [], _LOOK_SECONDS)
            if readable:
                self._obey()
            self._pass_due()
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
            elif line.startswith(b"pass "):
                self._to_pass.setdefault(int(line[5:]), time.monotonic() + _PASS_AFTER)

    def note(self, number: int) -> None:
        """Record that this process itself received a signal. Called by a signal handler."""
        self._received[number] = time.monotonic()

    def _pass_due(self) -> None:
        """Pass on the signals that are due, except those that the sender gave to every process of the job."""
        now = time.monotonic()
        for number in [number for number, due in self._to_pass.items() if due <= now]:
            del self._to_pass[number]
            if now - self._received.pop(number, -_SAME_SENDING) < _SAME_SENDING:
                continue
            handling = handlers_of(number, os.getpid())
            signal_all(handling, number)
            os.write(self._report, f"passed {number}:{len(handling)}\n".encode())

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
        kill_at = time.monotonic() + min(self._grace, LONGEST_GRACE_FOR_REST)
        signal_all(descendants(os.getpid()), signal.SIGTERM)
        while rest := descendants(os.getpid()):
            if time.monotonic() >= kill_at:
                signal_all(rest, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)
            self._reap()


def main(arguments: list[str]) -> int:
    """``guard.py <lifeline> <report> <grace> <descriptor for the command, or -1> <command>...``"""
    lifeline, report, grace = int(arguments[0]), int(arguments[1]), float(arguments[2])
    guard: Guard | None = None

    def note(number: int, _: object) -> None:
        if guard is not None:
            guard.note(number)

    for number in (*ENDING, *PASSED):
        signal.signal(number, note)  # handled, and not ignored: the child would inherit that
    set_subreaper()
    os.set_inheritable(lifeline, False)
    os.set_inheritable(report, False)
    try:
        guard = Guard(arguments[4:], lifeline, report, grace, int(arguments[3]))
    except OSError as error:
        os.write(report, f"failed {error.strerror or error}\n".encode())
        return 127
    os.write(report, f"pid {guard.child.pid}\n".encode())
    status = guard.run()
    os.write(report, f"status {status}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
