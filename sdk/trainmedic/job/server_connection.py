"""Rank 0's connection to the server."""

from __future__ import annotations

import logging
import os
import socket
from abc import ABC, abstractmethod
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


class CommandChannel(ABC):
    """A process's commands and replies. The caller starts writer and receiver."""

    def __init__(
        self,
        settings: Settings,
        addressee: Addressee,
        presence: str,
        handlers: HandlerRegistry,
        on_outcome: OutcomeCallback,
        meanwhile: str = "training continues",
    ) -> None:
        self.job = settings.job
        self.instance = envelope.new_id()
        host = socket.gethostname()
        self._process = {"host": host, "instance": self.instance, "sdk": __version__}
        writing = RedisConnection(settings.find_url, OutageLog(self.job, meanwhile))
        receiving = writing.shared()
        signer = Signer(settings.read_keys) if settings.read_keys is not None else None
        memory = CommandMemory(f"{addressee.kind}:{addressee.name}", self.instance, signer)
        key = PresenceKey(presence, self.job, self._describe_process, self.log_conflict)
        self.writer = ReplyWriter(writing, memory, addressee.stream, key, signer)
        self.queue = CommandQueue(self.job, host, memory, handlers, self.writer.put, on_outcome)
        self.receiver = CommandReceiver(receiving, addressee, signer, self.queue)

    def _describe_process(self) -> Mapping[str, Any]:
        return {"job": self.job, **self._process, "pid": os.getpid(), **self.describe()}

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Return further members of the presence."""

    @abstractmethod
    def log_conflict(self, presence: Mapping[str, Any]) -> None:
        """Log another live process of the same name."""


class ServerConnection(CommandChannel):
    def __init__(
        self,
        settings: Settings,
        handlers: HandlerRegistry,
        on_outcome: OutcomeCallback,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        job = settings.job
        self._describe_job = describe
        self._conflicting: Any = None  # instance of the same name that was logged last
        addressee = Addressee("job", job, envelope.job_commands(job), "rank-0", job)
        super().__init__(settings, addressee, envelope.job_presence(job), handlers, on_outcome)

    def close(self, timeout: float, error: BaseException | None) -> None:
        self.queue.fail_all("the job ended before it came to the command")
        if os.environ.get(TOLD_BY_LAUNCHER) != self.job:
            self._report_end(error)
        self.writer.stop(timeout)

    def _report_end(self, error: BaseException | None) -> None:
        reason = ending.failure(error)
        kind = ENDED if reason is None else FAILED
        notice = Notice(self.job, kind, self.instance, number=1, at=envelope.utc_now(), reason=reason or "")
        self.writer.put(OutgoingReplies(notice=notice))

    def describe(self) -> Mapping[str, Any]:
        return {"rank": 0, "says_end": True, **self._describe_job()}

    def log_conflict(self, presence: Mapping[str, Any]) -> None:
        if presence.get("instance") != self._conflicting:
            self._conflicting = presence.get("instance")
            where = f"host {presence.get('host')}, pid {presence.get('pid')}"
            log.error("%s: another process has this job's name (%s); give each a name of its own", self.job, where)


def pod_namespace(file: Path = _NAMESPACE_FILE) -> str | None:
    # None outside of Kubernetes.
    try:
        name = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if 0 < len(name) <= _LONGEST_NAMESPACE and name.isprintable() else None
