"""The launcher's connection to the server; only its threads and `close` wait for Redis."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Any, Mapping

from trainmedic.errors import ConfigurationError
from trainmedic.job.command import JobCommand
from trainmedic.job.connect_options import check_url
from trainmedic.job.handlers import LIVE, HandlerRegistry, as_it_was
from trainmedic.job.queue import CommandQueue
from trainmedic.launch.causes import Cause
from trainmedic.launch.membership import EXCLUDE, INCLUDE, NodeExclusions
from trainmedic.settings import Settings, resolve
from trainmedic.version import __version__
from trainmedic.wire import envelope
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.notice import Notice, launcher_commands, launcher_name, launcher_presence
from trainmedic.wire.receiver import Addressee, CommandReceiver
from trainmedic.wire.signing import Signer
from trainmedic.wire.writer import OutgoingReplies, PresenceKey, ReplyWriter

log = logging.getLogger("trainmedic")

_STOP_SECONDS = 5.0


class ServerLink:
    def __init__(
        self, settings: Settings, membership: NodeExclusions, bounds: Mapping[str, int], reports_ends: bool = False
    ) -> None:
        job, name = settings.job, launcher_name(settings.job, membership.node)
        signer = Signer(settings.read_keys) if settings.read_keys is not None else None
        outage = OutageLog(job, "the job continues")
        writing = RedisConnection(settings.find_url, outage)
        receiving = writing.shared()
        self.job = job
        self._membership = membership
        self._instance = envelope.new_id()
        self._number = 0
        self._state: dict[str, Any] = {"attempt": 0, "state": "starting"}
        self._constants = {
            "node": membership.node,
            "starts_all_nodes": membership.starts_all_nodes,
            "reports_ends": reports_ends,  # if True, the server awaits a report before it diagnoses a failure
            **bounds,
        }
        stream = launcher_commands(name)
        memory = CommandMemory(f"launcher:{name}", self._instance, signer)
        presence = PresenceKey(launcher_presence(name), job, self._describe, _log_conflict)
        self._writer = ReplyWriter(writing, memory, stream, presence, signer)
        self._handlers = HandlerRegistry(job, {}, contextlib.nullcontext)
        self._handlers.register(EXCLUDE, membership.exclude, LIVE, membership.is_in_force)
        self._handlers.register(INCLUDE, membership.include, LIVE, as_it_was)
        host = socket.gethostname()
        self._queue = CommandQueue(job, host, memory, self._handlers, self._writer.put, self._report_outcome)
        addressee = Addressee("launcher", name, stream, "launcher", job)
        self._receiver = CommandReceiver(receiving, addressee, signer, self._queue)
        self._writer.start()
        self._receiver.start()

    def show(self, state: str, attempt: int) -> None:
        self._state = {"attempt": attempt, "state": state}
        self._writer.announce()

    def send_notice(
        self, kind: str, attempt: int, reason: str = "", cause: Cause | None = None, *, restarts: bool = False
    ) -> None:
        self._number += 1
        first = cause if cause is not None and not cause.lost_peer else None  # a victim is not the first failure
        notice = Notice(
            self.job,
            kind,
            self._instance,
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
        self._writer.put(OutgoingReplies(notice=notice))

    def carry_out(self) -> None:
        if self._queue.has_work:
            for command in self._handlers.carry_out(self._queue.take_due(envelope.utc_now())):
                command.unsupported("a launcher does not carry it out")

    def close(self) -> None:
        self._receiver.stop(_STOP_SECONDS)
        self._queue.fail_all("the launcher ended before it came to the command")
        self._writer.stop(_STOP_SECONDS)

    def _report_outcome(self, command: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        self._handlers.in_progress.pop(command.id, None)
        self._queue.close(command, status, output)

    def _describe(self) -> Mapping[str, Any]:
        process = {"host": socket.gethostname(), "pid": os.getpid(), "instance": self._instance, "sdk": __version__}
        left_out = {"left_out": list(self._membership.without)}
        if self._membership.without_for_load:
            left_out["left_out_for_load"] = list(self._membership.without_for_load)
        return {"job": self.job, **self._constants, **process, **self._state, **left_out}


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


def _log_conflict(presence: Mapping[str, Any]) -> None:
    log.warning("another trainmedic-run starts this job on this node too: pid %s", presence.get("pid"))
