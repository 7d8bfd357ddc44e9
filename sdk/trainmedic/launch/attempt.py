from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

from trainmedic.job import status_file
from trainmedic.job.rotating_file import RotatingFile
from trainmedic.launch import causes, guard, output, terminal
from trainmedic.launch.causes import HANG, AttemptRecord, Cause, RankEnd, Reached
from trainmedic.launch.guarded import Guarded
from trainmedic.launch.job_status import StatusReader
from trainmedic.launch.output import OutputCopies
from trainmedic.wire.log_layout import AttemptLogs

log = logging.getLogger("trainmedic")

_POLL_SECONDS = 0.2
# Seconds beyond the job's own limit after which a hang is ended for a waiting rollback. A job of one rank interrupts
# itself sooner.
_HANG_WITH_ROLLBACK_S = 10.0
_BOUND_INTERVAL_S = 5.0  # between two checks of the sizes of torchrun's files
_OUTPUT_SECONDS = 5.0  # after the end, for the rest of the output


@dataclass(frozen=True)
class AttemptPlan:
    number: int
    argv: Sequence[str]
    logs: AttemptLogs | None
    node: str
    environment: Mapping[str, str]
    grace: float
    """Seconds to SIGKILL."""
    hang_after: float | None  # seconds beyond the job's own limit; None for never
    most_output: int
    """Bytes of each file."""
    prints_to_terminal: bool = False


@dataclass(frozen=True)
class AttemptEnd:
    exit_code: int
    record: AttemptRecord
    waiting: tuple[str, ...] = ()  # IDs of rollbacks for the next attempt

    @property
    def is_success(self) -> bool:
        return self.exit_code == 0 and self.record.cause.kind != HANG


class JobAttempt:
    def __init__(self, plan: AttemptPlan, begin: Callable[[Mapping[str, str]], Guarded | None] | None = None) -> None:
        """`begin` starts the attempt in a standby process, or returns None."""
        self._plan = plan
        self._begin = begin
        self._lifeline = -1  # descriptor of the pipe for orders to the guard; -1 while none runs
        self._terminals: list[int] = []
        self._is_stopping = False
        self._is_hung = False
        self._reached = Reached()
        self._waiting: tuple[str, ...] = ()
        self._directory = plan.logs.path if plan.logs is not None else None
        self._status = StatusReader(self._directory) if self._directory is not None else None
        self._bounded_at = time.monotonic()
        self._received = b""  # the guard's report, without `passed` lines

    def stop(self, signal_number: int) -> None:
        self._is_stopping = True
        self._send_order(f"end {signal_number}")

    def pass_on(self, signal_number: int) -> None:
        self._send_order(f"pass {signal_number}")

    def resize(self) -> None:
        for descriptor in self._terminals:
            terminal.resize(descriptor)

    def _send_order(self, order: str) -> None:
        if self._lifeline >= 0:
            with contextlib.suppress(OSError):
                os.write(self._lifeline, f"{order}\n".encode())

    def run(self, while_running: Callable[[], None]) -> AttemptEnd:
        """Run the command; call `while_running` several times a second. Raises OSError if it cannot start."""
        environment = dict(self._plan.environment)
        if self._directory is not None:
            environment[status_file.VARIABLE] = str(self._directory)
        plan, logs = self._plan, self._plan.logs
        stored = RotatingFile(logs.launcher(plan.node) if logs is not None else None, plan.most_output)
        try:
            started = self._begin(environment) if self._begin is not None else None
            if started is not None:
                printed = self._follow(started, stored, while_running)
                if started.has_begun() or self._is_stopping:  # always called, as it closes the order socket
                    return self._end(printed)
                log.warning("the standby process ended before the attempt; starting without it")
                self._received = b""
            started = Guarded(plan.argv, environment, plan.grace, prints_to_terminal=plan.prints_to_terminal)
            return self._end(self._follow(started, stored, while_running))
        finally:
            stored.close()

    def _follow(self, started: Guarded, stored: RotatingFile, while_running: Callable[[], None]) -> str:
        self._lifeline, report = started.lifeline, started.report
        copies = OutputCopies([(started.out, 1), (started.err, 2)], stored)
        if started.prints_to_terminal:
            self._terminals = [started.out, started.err]
        try:
            self._watch(report, while_running)
        finally:
            self._terminals = []
            lifeline, self._lifeline = self._lifeline, -1
            os.close(lifeline)
            os.close(report)
            started.process.wait()
            self._end_orphans()
            copies.finish(_OUTPUT_SECONDS)
        return copies.tail(started.err)

    def _watch(self, report: int, while_running: Callable[[], None]) -> None:
        while True:
            readable, _, _ = select.select([report], [], [], _POLL_SECONDS)
            if readable:
                received = os.read(report, 4096)
                if not received:
                    return
                self._received += received
                self._log_unhandled()
            self._check_status()
            while_running()

    def _log_unhandled(self) -> None:
        *lines, rest = self._received.split(b"\n")
        others: list[bytes] = []
        for line in lines:
            if not line.startswith(b"passed "):
                others.append(line)
                continue
            number, _, count = line.removeprefix(b"passed ").partition(b":")
            if count == b"0":
                name = causes.signal_name(int(number))
                log.warning("%s was not passed on: no process of the job handles it, and it would end the job", name)
        self._received = b"\n".join([*others, rest])

    def _check_status(self) -> None:
        status = self._status.read() if self._status is not None else None
        if status is not None:
            self._reached = self._reached.further_of(status.reached)
            self._waiting = status.waiting
            hang_after = self._plan.hang_after
            if hang_after is not None and status.waiting:
                hang_after = min(hang_after, _HANG_WITH_ROLLBACK_S)
            if hang_after is not None and status.stalled_for > hang_after and not self._is_hung:
                self._is_hung = True
                message = "the job hangs: no step for %.0f s beyond its limit%s; ending the attempt"
                log.error(message, status.stalled_for, ", and a rollback waits" if status.waiting else "")
                self.stop(signal.SIGTERM)
        if time.monotonic() - self._bounded_at > _BOUND_INTERVAL_S:
            self._bounded_at = time.monotonic()
            for path in self._rank_files("std*.log"):
                output.bound_file(path, self._plan.most_output)

    def _end(self, printed: str) -> AttemptEnd:
        fields = dict(line.split(" ", 1) for line in self._received.decode(errors="replace").splitlines())
        if "failed" in fields:
            raise OSError(f"{self._plan.argv[0]} cannot be started: {fields['failed']}")
        # Without a status, the guard and its processes were killed.
        status = os.waitstatus_to_exitcode(int(fields["status"])) if "status" in fields else -signal.SIGKILL
        ranks = causes.rank_ends(printed)
        own = {end.rank: text for end in ranks if (text := self._printed_by(end, printed)) is not None}
        pid = int(fields["pid"]) if "pid" in fields else None
        cause = Cause(0, HANG) if self._is_hung else causes.cause_of(status, ranks, own, printed, pid)
        record = AttemptRecord(self._plan.number, cause, self._reached, ranks)
        return AttemptEnd(status if status >= 0 else 128 - status, record, self._waiting)

    def _end_orphans(self) -> None:
        if b"status" in self._received or b"failed" in self._received:
            return  # the guard has ended all
        deadline = time.monotonic() + _OUTPUT_SECONDS
        while (left := guard.descendants(os.getpid())) and time.monotonic() < deadline:
            guard.signal_all(left, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(_POLL_SECONDS)

    def _printed_by(self, end: RankEnd, printed: str) -> str | None:  # None if unknown
        files = sorted(self._rank_files(f"{end.local_rank}/stderr.log"))
        try:
            return output.end_of(files[-1]) if files else causes.lines_of(end, printed)
        except OSError:
            return None

    def _rank_files(self, pattern: str) -> list[Path]:
        logs = self._plan.logs
        return [*logs.ranks(self._plan.node).glob(f"**/{pattern}")] if logs is not None else []
