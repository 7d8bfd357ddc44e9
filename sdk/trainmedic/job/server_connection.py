"""Rank 0's connection to the server."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any, Callable, Mapping

from trainmedic.job import ending
from trainmedic.job.command import OutcomeCallback
from trainmedic.job.handlers import HandlerRegistry
from trainmedic.job.queue import CommandQueue
from trainmedic.settings import Settings
from trainmedic.version import __version__
from trainmedic.wire import envelope
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.notice import ENDED, FAILED, Notice
from trainmedic.wire.receiver import Addressee, CommandReceiver
from trainmedic.wire.signing import Signer
from trainmedic.wire.writer import OutgoingReplies, PresenceKey, ReplyWriter

log = logging.getLogger("trainmedic")

TOLD_BY_LAUNCHER = "TRAINMEDIC_TOLD_BY_LAUNCHER"
"""Environment variable: job whose launcher reports each attempt's end."""

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LONGEST_NAMESPACE = 63


class ServerConnection:
    def __init__(
        self,
        settings: Settings,
        handlers: HandlerRegistry,
        on_outcome: OutcomeCallback,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        job = settings.job
        self._job = job
        self._host = socket.gethostname()
        self._instance = envelope.new_id()
        self._describe_job = describe
        self._conflicting: Any = None  # instance of the same name that was logged last
        outage = OutageLog(job)
        writing = RedisConnection(settings.find_url, outage)
        receiving = writing.shared()
        signer = Signer(settings.read_keys) if settings.read_keys is not None else None
        memory = CommandMemory(f"job:{job}", self._instance, signer)
        stream = envelope.job_commands(job)
        presence = PresenceKey(envelope.job_presence(job), job, self._describe, self._log_conflict)
        self.writer = ReplyWriter(writing, memory, stream, presence, signer)
        self.queue = CommandQueue(job, self._host, memory, handlers, self.writer.put, on_outcome)
        addressee = Addressee("job", job, stream, "rank-0", job)
        self.receiver = CommandReceiver(receiving, addressee, signer, self.queue)

    def close(self, timeout: float, error: BaseException | None) -> None:
        self.queue.fail_all("the job ended before it came to the command")
        if os.environ.get(TOLD_BY_LAUNCHER) != self._job:
            self._report_end(error)
        self.writer.stop(timeout)

    def _report_end(self, error: BaseException | None) -> None:
        reason = ending.failure(error)
        kind = ENDED if reason is None else FAILED
        notice = Notice(self._job, kind, self._instance, number=1, at=envelope.utc_now(), reason=reason or "")
        self.writer.put(OutgoingReplies(notice=notice))

    def _describe(self) -> Mapping[str, Any]:
        process = {"host": self._host, "pid": os.getpid(), "instance": self._instance, "sdk": __version__}
        return {"job": self._job, "rank": 0, "says_end": True, **process, **self._describe_job()}

    def _log_conflict(self, presence: Mapping[str, Any]) -> None:
        if presence.get("instance") != self._conflicting:
            self._conflicting = presence.get("instance")
            where = f"host {presence.get('host')}, pid {presence.get('pid')}"
            log.error("%s: another process has this job's name (%s); give each a name of its own", self._job, where)


def pod_namespace(file: Path = _NAMESPACE_FILE) -> str | None:
    # None outside of Kubernetes.
    try:
        name = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if 0 < len(name) <= _LONGEST_NAMESPACE and name.isprintable() else None
