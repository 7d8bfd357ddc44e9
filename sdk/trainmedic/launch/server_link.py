"""The launcher's connection to the server; only its threads and `close` wait for Redis."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Mapping

from trainmedic.errors import ConfigurationError
from trainmedic.job.command import JobCommand
from trainmedic.job.connect_options import check_url
from trainmedic.job.handlers import LIVE, HandlerRegistry, as_it_was
from trainmedic.job.server_connection import CommandChannel
from trainmedic.launch.causes import Cause
from trainmedic.launch.membership import EXCLUDE, INCLUDE, NodeExclusions
from trainmedic.settings import Settings, resolve
from trainmedic.wire import envelope
from trainmedic.wire.notice import Notice, launcher_commands, launcher_name, launcher_presence
from trainmedic.wire.receiver import Addressee
from trainmedic.wire.writer import OutgoingReplies

log = logging.getLogger("trainmedic")

_STOP_SECONDS = 5.0  # for each of receiver and writer


class ServerLink(CommandChannel):
    def __init__(
        self, settings: Settings, membership: NodeExclusions, bounds: Mapping[str, int], reports_ends: bool = False
    ) -> None:
        job, name = settings.job, launcher_name(settings.job, membership.node)
        self._membership = membership
        self._number = 0  # of the last notice
        self._state: dict[str, Any] = {"attempt": 0, "state": "starting"}
        self._constants = {
            "node": membership.node,
            "starts_all_nodes": membership.starts_all_nodes,
            "reports_ends": reports_ends,  # if True, the server awaits a report before it diagnoses a failure
            **bounds,
        }
        self._handlers = HandlerRegistry(job, {}, contextlib.nullcontext)
        self._handlers.register(EXCLUDE, membership.exclude, LIVE, membership.is_in_force)
        self._handlers.register(INCLUDE, membership.include, LIVE, as_it_was)
        addressee = Addressee("launcher", name, launcher_commands(name), "launcher", job)
        presence, on_outcome = launcher_presence(name), self._report_outcome
        super().__init__(settings, addressee, presence, self._handlers, on_outcome, "the job continues")
        self.writer.start()
        self.receiver.start()

    def show(self, state: str, attempt: int) -> None:
        self._state = {"attempt": attempt, "state": state}
        self.writer.announce()

    def send_notice(
        self, kind: str, attempt: int, reason: str = "", cause: Cause | None = None, *, restarts: bool = False
    ) -> None:
        self._number += 1
        first = cause if cause is not None and not cause.lost_peer else None  # a victim is not the first failure
        notice = Notice(
            self.job,
            kind,
            self.instance,
            self._number,
            envelope.utc_now(),
            attempt=max(attempt, 1),
            reason=reason,
            node=self._membership.node,
            status=first.status if first is not None else None,
            rank=first.rank if first is not None else None,
            pid=first.pid if first is not None else None,
            error=cause.kind if cause is not None else "",
            restarts=restarts,
        )
        self.writer.put(OutgoingReplies(notice=notice))

    def carry_out(self) -> None:
        if self.queue.has_work:
            for command in self._handlers.carry_out(self.queue.take_due(envelope.utc_now())):
                command.unsupported("a launcher does not carry it out")

    def close(self) -> None:
        self.receiver.stop(_STOP_SECONDS)
        self.queue.fail_all("the launcher ended before it came to the command")
        self.writer.stop(_STOP_SECONDS)

    def _report_outcome(self, command: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        self._handlers.in_progress.pop(command.id, None)
        self.queue.close(command, status, output)

    def describe(self) -> Mapping[str, Any]:
        left_out = {"left_out": list(self._membership.without)}
        if self._membership.without_for_load:
            left_out["left_out_for_load"] = list(self._membership.without_for_load)
        return {**self._constants, **self._state, **left_out}

    def log_conflict(self, presence: Mapping[str, Any]) -> None:
        log.warning("another trainmedic-run starts this job on this node too: pid %s", presence.get("pid"))


def open_link(
    job: str | None, membership: NodeExclusions, bounds: Mapping[str, int], reports_ends: bool = False
) -> ServerLink | None:
    """Return the link of this job, else of TRAINMEDIC_JOB.

    None without one or with wrong settings, which must not prevent a start.
    """
    if not job and not os.environ.get("TRAINMEDIC_JOB"):
        log.warning("not reporting to the server: no job name is set; use --job or TRAINMEDIC_JOB")
        return None
    try:
        settings = resolve(job, None, None, rank=0, world_size=1)
        check_url(settings)
        return ServerLink(settings, membership, bounds, reports_ends)
    except (ConfigurationError, ValueError) as error:
        log.warning("cannot report to the server: %s", error)
        return None
