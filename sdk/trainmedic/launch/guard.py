"""Process between ``trainmedic-run`` and a job: none of the job's processes outlives either.

It runs by its path, with the standard library only, and adopts the job's orphans. Orders come by the lifeline, a pipe:

- ``end <signal>`` signals the job's first process, and kills all after the grace period.
- ``pass <signal>`` signals the processes that handle it.

A closed lifeline means SIGTERM. The report pipe gets lines: ``pid`` or ``failed``, ``passed <signal>:<processes>``, and
last ``status`` with the child's wait status.
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
_POLL_SECONDS = 0.05
LONGEST_GRACE_FOR_REST = 5.0  # seconds for processes that outlive the child
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED = (signal.SIGUSR1, signal.SIGUSR2)
# Seconds in which a scheduler signals all processes of a job step.
_PASS_AFTER = 0.3
# Seconds within which an own signal and an order to pass it have one origin.
_SAME_SENDING = 5.0


def set_subreaper() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    children = _children()
    below: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        below += level
    return below


def _children() -> dict[int, list[int]]:
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
    """Return the topmost processes below `root` that catch or block a signal.

    Descendants may have inherited the handler by fork. srun blocks its signals and waits for them (``sigwait``).
    """
    bit = 1 << (number - 1)
    children = _children()
    handling: list[int] = []
    level = [root]
    while level:
        below = [child for parent in level for child in children.get(parent, ())]
        masks = {pid: _handled_signals(pid) for pid in below}
        handling += [pid for pid in below if masks[pid] & bit]
        level = [pid for pid in below if not masks[pid] & bit]
    return handling


def _handled_signals(pid: int) -> int:
    mask = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name in ("SigCgt", "SigBlk"):
                mask |= int(value, 16)
    return mask


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            os.kill(pid, number)


def _write(report: int, line: str) -> None:
    with contextlib.suppress(OSError):  # the launcher may have ended: this process must still end the job
        os.write(report, f"{line}\n".encode())


class Guard:
    def __init__(self, argv: list[str], lifeline: int, report: int, grace: float, passed_fd: int = -1) -> None:
        self._lifeline = lifeline
        self._grace = grace
        self._orders = b""  # incomplete line
        self._end_at: float | None = None  # when SIGKILL is due
        self._status: int | None = None
        self._due_to_pass: dict[int, float] = {}  # time by signal
        self._received: dict[int, float] = {}  # last time that this process got a signal
        self._report = report
        own = os.getpid()

        def die_with_guard() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != own:
                os._exit(127)

        passed = (passed_fd,) if passed_fd >= 0 else ()
        self.child = subprocess.Popen(argv, preexec_fn=die_with_guard, pass_fds=passed)  # noqa: S603 - the user's own command

    def run(self) -> int:
        while True:
            readable, _, _ = select.select([self._lifeline] if self._lifeline >= 0 else [], [], [], _POLL_SECONDS)
            if readable:
                self._read_orders()
            self._pass_due()
            self._reap()
            if self._status is not None:
                self._end_remaining()
                return self._status
            if self._end_at is not None and time.monotonic() >= self._end_at:
                signal_all(descendants(os.getpid()), signal.SIGKILL)

    def _read_orders(self) -> None:
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
                self._due_to_pass.setdefault(int(line[5:]), time.monotonic() + _PASS_AFTER)

    def note(self, number: int) -> None:
        # If this process got a signal itself, its sender may have signalled the whole job.
        self._received[number] = time.monotonic()

    def _pass_due(self) -> None:
        """Pass on due signals, except those that the sender gave to the whole job."""
        now = time.monotonic()
        for number in [number for number, due in self._due_to_pass.items() if due <= now]:
            del self._due_to_pass[number]
            if now - self._received.pop(number, -_SAME_SENDING) < _SAME_SENDING:
                continue
            handling = handlers_of(number, os.getpid())
            signal_all(handling, number)
            _write(self._report, f"passed {number}:{len(handling)}")

    def _end_all(self, number: int) -> None:
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

    def _end_remaining(self) -> None:
        kill_at = time.monotonic() + min(self._grace, LONGEST_GRACE_FOR_REST)
        signal_all(descendants(os.getpid()), signal.SIGTERM)
        while rest := descendants(os.getpid()):
            if time.monotonic() >= kill_at:
                signal_all(rest, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
            self._reap()


def main(arguments: list[str]) -> int:
    """``guard.py <lifeline> <report> <grace> <descriptor for the command, or -1> <command>...``"""
    lifeline, report, grace = int(arguments[0]), int(arguments[1]), float(arguments[2])
    guard: Guard | None = None

    def note(number: int, _: object) -> None:
        if guard is not None:
            guard.note(number)

    for number in (*ENDING, *PASSED):
        signal.signal(number, note)  # handled rather than ignored, which the child would inherit
    set_subreaper()
    os.set_inheritable(lifeline, False)
    os.set_inheritable(report, False)
    try:
        guard = Guard(arguments[4:], lifeline, report, grace, int(arguments[3]))
    except OSError as error:
        _write(report, f"failed {error.strerror or error}")
        return 127
    _write(report, f"pid {guard.child.pid}")
    status = guard.run()
    _write(report, f"status {status}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
