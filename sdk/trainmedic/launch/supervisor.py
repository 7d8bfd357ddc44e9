"""Successive attempts of a job."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Mapping

from trainmedic.job import status_file
from trainmedic.job.server_connection import TOLD_BY_LAUNCHER
from trainmedic.launch import attempt_logs, causes, guard, terminal
from trainmedic.launch.attempt import AttemptEnd, AttemptPlan, JobAttempt
from trainmedic.launch.causes import AttemptRecord, Cause, signal_name
from trainmedic.launch.command_line import LaunchLine
from trainmedic.launch.guarded import Guarded, WarmStandby
from trainmedic.launch.membership import NodeExclusions
from trainmedic.launch.server_link import ServerLink
from trainmedic.settings import ATTEMPT
from trainmedic.wire import log_layout, notice
from trainmedic.wire.log_layout import AttemptLogs

log = logging.getLogger("trainmedic")

# Seconds from an attempt's start to that of the next standby process.
_STANDBY_AFTER = 10.0
# Longest delay after an attempt with progress, in seconds.
_DELAY_AFTER_PROGRESS = 5.0
_POLL_SECONDS = 0.2
CANNOT_START = 127  # exit code


@dataclass(frozen=True)
class LaunchOptions:
    """Times in seconds."""

    line: LaunchLine
    retries: int  # after failures in a row without progress
    delay: float  # before the next attempt; after progress it may be shorter
    grace: float  # from the signal that ends the job to SIGKILL
    hang_after: float | None  # beyond the job's own limit; None for never
    job: str
    log_dir: Path | None
    most_output: int  # bytes
    keeps_ranks: bool  # store the ranks' output
    nodes: tuple[int, int] | None = None  # least and most, for an elastic torchrun
    prints_to_terminal: bool = False
    is_warm: bool = False


class Supervisor:
    """Call `run` on the main thread."""

    def __init__(self, options: LaunchOptions, membership: NodeExclusions, link: ServerLink | None) -> None:
        self._options = options
        self._membership = membership
        self._link = link
        self._stopped_by: int | None = None  # signal
        self._signals: list[int] = []  # received and not yet sent to the job
        self._signals_to_pass: list[int] = []  # such as SIGUSR1, which end nothing
        self._terminal_changed = False
        self._standby: WarmStandby | None = None
        self._failed: list[AttemptRecord] = []
        self._had_rank_0 = False  # the last attempt ran rank 0 on this node
        self._waiting: tuple[str, ...] = ()  # rollbacks that wait for the next attempt

    def run(self) -> int:
        try:
            return self._run()
        finally:
            if self._standby is not None:
                self._standby.close()

    def _run(self) -> int:
        for ending in guard.ENDING:
            if signal.getsignal(ending) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(ending, self._handle_ending)
        for passed in guard.PASSED:
            signal.signal(passed, self._handle_passed)
        if self._options.prints_to_terminal:
            terminal.follow_size(self._handle_resize)
        number = first = self._first_number()
        while True:
            self._wait_while_left_out(number)
            if self._stopped_by is not None:
                return 128 + self._stopped_by
            if number > first:
                self._report(notice.RESTARTED, number, self._reason_of_restart())
            self._show("running", number)
            try:
                end = self._run_attempt(number)
            except OSError as error:
                log.error("%s", error)
                self._report(notice.GONE, number, "its command cannot be started")
                return CANNOT_START
            if self._stopped_by is not None:
                self._report(notice.ENDED, number, f"ended by {signal_name(self._stopped_by)}")
                return end.exit_code or (0 if end.record.cause.status == 0 else 128 + self._stopped_by)
            if end.is_success and not self._membership.has_changed:
                self._store_success(number)
                self._report(notice.ENDED, number)
                return 0
            if not self._membership.has_changed and not self._wait_for_next(end, number):
                return end.exit_code or 1
            number += 1

    def _wait_while_left_out(self, number: int) -> None:
        was_left_out = self._membership.is_left_out
        if was_left_out:
            log.warning("this node is excluded; waiting until it is included")
            self._show("left_out", number)
        self._membership.answer()  # exclusions and inclusions, now that the attempt has ended
        while self._membership.is_left_out and self._stopped_by is None:
            time.sleep(_POLL_SECONDS)
            self._carry_out()
        if was_left_out:
            self._membership.answer()  # the inclusion that ended the wait

    def _reason_of_restart(self) -> str:
        without = ", ".join(self._membership.without)
        return f"without {without}" if without else ""

    def _carry_out(self) -> None:
        if self._link is not None:
            self._link.carry_out()

    def _run_attempt(self, number: int) -> AttemptEnd:
        options = self._options
        logs = self._logs(number)
        rank_logs = logs.ranks(self._membership.node) if logs is not None and options.keeps_ranks else None
        plan = AttemptPlan(
            number=number,
            argv=options.line.for_attempt(rank_logs, self._membership.without, options.nodes),
            logs=logs,
            node=self._membership.node,
            environment=self._environment(number, logs),
            grace=options.grace,
            hang_after=options.hang_after,
            most_output=options.most_output,
            prints_to_terminal=options.prints_to_terminal,
        )
        standby, self._standby = self._standby or self._new_standby(), None
        line = options.line

        def begin(environment: Mapping[str, str]) -> Guarded | None:
            return standby.begin(plan.argv, line.torchrun_arguments(plan.argv), environment) if standby else None

        attempt = JobAttempt(plan, begin)
        is_ending = False
        begun_at = time.monotonic()

        def while_running() -> None:
            nonlocal is_ending
            while self._signals:
                attempt.stop(self._signals.pop(0))
            while self._signals_to_pass:
                attempt.pass_on(self._signals_to_pass.pop(0))
            if self._terminal_changed:
                self._terminal_changed = False
                attempt.resize()
            if self._standby is None and time.monotonic() - begun_at > _STANDBY_AFTER:
                self._standby = self._new_standby()
            self._carry_out()
            if self._membership.has_changed and not is_ending:
                is_ending = True
                attempt.stop(signal.SIGTERM)

        self._had_rank_0 = False
        try:
            end = attempt.run(while_running)
            self._waiting = end.waiting
            self._had_rank_0 = any(each.rank == 0 for each in end.record.ranks)
            return end
        finally:
            if logs is not None and (logs.path / status_file.FILE_NAME).exists():
                self._had_rank_0 = True

    def _new_standby(self) -> WarmStandby | None:
        options = self._options
        interpreter = options.line.interpreter
        if not options.is_warm or self._stopped_by is not None or interpreter is None:
            return None
        try:
            terminals = options.prints_to_terminal
            return WarmStandby(interpreter, options.line.threads, options.grace, prints_to_terminal=terminals)
        except OSError as error:
            log.warning("--warm has no effect: %s", error)
            self._options = replace(options, is_warm=False)
            return None

    def _environment(self, number: int, logs: AttemptLogs | None) -> dict[str, str]:
        environment = {**os.environ, ATTEMPT: str(number), status_file.WAITING: ",".join(self._waiting)}
        environment.update(attempt_logs.variables(logs, self._options.log_dir, self._membership.node, os.environ))
        if self._link is not None:
            environment[TOLD_BY_LAUNCHER] = self._link.job
        if self._options.nodes is not None or self._options.line.restarts_ranks:
            # If torchrun shares its rendezvous store with the ranks, restarted or resized groups hang (seen with
            # PyTorch 2.13 and gloo, without Trainmedic too).
            environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        return environment

    def _wait_for_next(self, end: AttemptEnd, number: int) -> bool:
        self._failed.append(end.record)
        self._store_failure(end.record)
        reason = str(end.record.cause)
        refusal = causes.refusal(self._failed, self._options.retries)
        self._report(notice.FAILED, number, reason, end.record.cause, restarts=refusal is None)
        if refusal is not None:
            log.error("attempt %d failed: %s; giving up", number, refusal)
            self._report(notice.GONE, number, refusal)
            return False
        delay = self._options.delay
        if causes.has_progress(self._failed):
            delay = min(delay, _DELAY_AFTER_PROGRESS)
        log.error("attempt %d failed: %s; next attempt in %.0f s", number, reason, delay)
        self._show("waiting", number)
        if self._standby is None:
            self._standby = self._new_standby()  # it imports during the wait
        begins_at = time.monotonic() + delay
        while time.monotonic() < begins_at and self._stopped_by is None and not self._membership.has_changed:
            time.sleep(_POLL_SECONDS)
            self._carry_out()
        if self._stopped_by is not None:
            self._report(notice.ENDED, number, f"ended by {signal_name(self._stopped_by)}")
        return self._stopped_by is None

    def _handle_ending(self, number: int, frame: FrameType | None) -> None:
        self._stopped_by = number
        self._signals.append(number)

    def _handle_passed(self, number: int, frame: FrameType | None) -> None:
        self._signals_to_pass.append(number)

    def _handle_resize(self) -> None:
        self._terminal_changed = True

    def _first_number(self) -> int:
        options = self._options
        if options.log_dir is None:
            return 1
        job = log_layout.job_directory(options.log_dir, options.job)
        return attempt_logs.first_number(
            job, self._membership.node, options.line.is_one_of_several or bool(options.nodes)
        )

    def _logs(self, number: int) -> AttemptLogs | None:
        if self._options.log_dir is None:
            return None
        logs = AttemptLogs.of(self._options.log_dir, self._options.job, number)
        try:
            attempt_logs.make_directories(logs)
        except OSError as error:
            log.warning("cannot store the job's output: %s: %s", error.strerror, logs.path)
            return None
        return logs

    def _store_failure(self, record: AttemptRecord) -> None:
        if self._options.log_dir is None:
            return
        try:
            job = log_layout.job_directory(self._options.log_dir, self._options.job)
            line = json.dumps(causes.as_plain(record, self._membership.node)) + "\n"
            with (job / "attempts.jsonl").open("a+b") as file:
                if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    line = f"\n{line}"  # a full disk cut the last line
                file.write(line.encode())
        except OSError as error:
            log.warning("cannot store the end of the attempt: %s", error.strerror)

    def _store_success(self, number: int) -> None:
        if self._options.log_dir is None:
            return
        logs = AttemptLogs.of(self._options.log_dir, self._options.job, number)
        try:
            logs.ended(self._membership.node).write_text(json.dumps({"attempt": number, "status": 0}) + "\n")
        except OSError as error:
            log.warning("cannot store the end of the attempt: %s", error.strerror)

    def _show(self, state: str, number: int) -> None:
        if self._link is not None:
            self._link.show(state, number)

    def _report(
        self, kind: str, number: int, reason: str = "", cause: Cause | None = None, *, restarts: bool = False
    ) -> None:
        # Each launcher reports that it gives up.
        if self._link is not None and (kind == notice.GONE or self._speaks_for_job()):
            self._link.send_notice(kind, number, reason, cause, restarts=restarts)

    def _speaks_for_job(self) -> bool:
        # Of several nodes' launchers, only that of rank 0 reports the job's end.
        if self._options.nodes is None and not self._options.line.is_one_of_several:
            return True
        return self._had_rank_0


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("trainmedic-run: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
