"""`connect` and what it returns: the training loop's side of Trainmedic.

The training thread only reads and writes plain attributes and queues here. Two background threads
of rank 0 talk to Redis (``reader``, ``writer``). Ranks other than 0 report and receive nothing: for
a job of several ranks, rank 0 shares what it was told with the others by the framework's own means.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections import deque
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, Callable, Mapping, TypeVar

from trainmedic import envelope
from trainmedic.commands import JobCommand
from trainmedic.errors import ConfigurationError, Rejected, Unsupported
from trainmedic.link import Link, Outage, open_client
from trainmedic.memory import Known, Memory
from trainmedic.metrics import Endpoint
from trainmedic.parameters import Parameters
from trainmedic.progress import HANG_FLOOR, REPAIR, STARTUP_FLOOR, Progress, Stall, Window
from trainmedic.reader import NOTHING_TO_UNDO, Reader
from trainmedic.settings import Settings, resolve
from trainmedic.version import __version__
from trainmedic.vitals import Vitals
from trainmedic.writer import Outgoing, Writer

log = logging.getLogger("trainmedic")

Handler = TypeVar("Handler", bound=Callable[[JobCommand], "Mapping[str, Any] | None"])

LIVE = "live"
RESTART = "restart"
UNSUPPORTED = "unsupported"
_CLOSE_SECONDS = 2.0


def connect(
    job: str | None = None,
    redis_url: str | None = None,
    signing_key: str | bytes | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    capabilities: Mapping[str, str] | None = None,
    hang_floor: float = HANG_FLOOR,
    startup_floor: float = STARTUP_FLOOR,
) -> Medic:
    """Connect a training job. Returns at once, whether or not Redis answers; never stops the training.

    ``job`` is the name that the job's alerts carry as ``job_name``. What is not given comes from the
    environment: TRAINMEDIC_JOB, TRAINMEDIC_REDIS_URL, TRAINMEDIC_SIGNING_KEY or _FILE; rank and world
    size from the launcher (torchrun, Open MPI, Slurm). Without any URL it is the one that a server of
    the same user on this machine has left in its state directory.

    ``metrics_port`` opens a Prometheus endpoint on rank 0, by default for this machine only; for a
    Prometheus elsewhere set ``metrics_host`` to the address to listen on (``"0.0.0.0"`` for all: the
    endpoint has no password). 0 picks a free port, see ``Medic.metrics_port``.

    ``capabilities`` says of actions whether they are carried out ``"live"``, by a ``"restart"`` of
    the loop, or ``"unsupported"``, which is then answered without troubling the loop.

    ``hang_floor``: a loop that completes no step for five times its usual time, and for at least so
    many seconds, hangs. ``startup_floor`` holds until it has its pace, and for a window (see `window`).

    Raises ConfigurationError.
    """
    settings = resolve(job, redis_url, signing_key, rank, world_size)
    known = dict(capabilities or {})
    for action, how in known.items():
        if how not in (LIVE, RESTART, UNSUPPORTED):
            raise ConfigurationError(f"capabilities: {action} is {how!r}; it can be live, restart or unsupported")
    if settings.redis_url is not None:
        try:
            open_client(settings.redis_url).close()
        except (ValueError, TypeError) as error:
            raise ConfigurationError("the Redis URL cannot be read") from error
    progress = Progress(time.perf_counter(), hang_floor, startup_floor)
    return Medic(settings, known, metrics_port, metrics_host, progress)


class Medic:
    """A connected job. Made by `connect`; also a context manager that closes it."""

    def __init__(
        self,
        settings: Settings,
        capabilities: dict[str, str],
        metrics_port: int | None,
        metrics_host: str,
        progress: Progress,
    ) -> None:
        self.job = settings.job
        self.rank = settings.rank
        self.world_size = settings.world_size
        self.progress = progress
        # The figures of all ranks, where something gathers them; else those of this one.
        self.gather: Callable[[], Mapping[int, Mapping[str, Any]]] | None = None
        # Called by the reader's thread when a command has come and waits for the loop.
        self.on_arrival: Callable[[], None] | None = None
        self._vitals = Vitals(progress, os.environ.get("TRAINMEDIC_NODE") or socket.gethostname())
        self.step: int | None = None
        self._capabilities = capabilities
        self._refusals: dict[str, str] = {}
        self._handlers: dict[str, Callable[[JobCommand], Mapping[str, Any] | None]] = {}
        # Filled by the reader, emptied by the training thread.
        self._arrived: deque[JobCommand] = deque()
        # Handed to the training loop and not answered.
        self._handed: dict[str, JobCommand] = {}
        # Both of them, by id, for the reader.
        self._waiting: dict[str, JobCommand] = {}
        self._pid = os.getpid()
        self._is_closed = False
        self._endpoint: Endpoint | None = None
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        if self.rank != 0:
            return
        if metrics_port is not None:
            self._endpoint = Endpoint(self.job, self.progress, self._ranks, metrics_host, metrics_port)
        self._memory = Memory(f"job:{self.job}", envelope.new_id())
        self._host = socket.gethostname()
        self._start(settings)
        atexit.register(self.close)

    @property
    def metrics_port(self) -> int | None:
        """The port of the Prometheus endpoint; None without one."""
        return self._endpoint.port if self._endpoint else None

    # --- the training loop's calls --------------------------------------------------------------------

    def report(
        self,
        step: int | None = None,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        samples: float | None = None,
        expected_learning_rate: Any = None,
        memory_bytes: float | None = None,
        own_seconds: float | None = None,
    ) -> None:
        """Say how a step went, once per step or every few. Numbers, or tensors of one element.

        ``samples`` is how many were trained on since the last report, on all ranks.
        ``expected_learning_rate`` is what the schedule says, times what Trainmedic has scaled it by:
        a rate that differs is somebody's mistake. ``memory_bytes`` is what an accelerator that is not
        CUDA's has in use. ``own_seconds`` is the part of the step's time in which this rank worked, and
        did not wait for others: by it a rank that holds up the rest is found. Costs about a
        microsecond and waits for nothing.
        """
        self.progress.note(
            step,
            loss,
            grad_norm,
            learning_rate,
            samples,
            time.perf_counter(),
            expected_learning_rate,
            memory_bytes,
            own_seconds,
        )

    def window(self, name: str) -> Window:
        """``with medic.window("checkpoint"):``, or ``"evaluation"``: time that belongs to no step.

        It counts neither as step time nor as a hang, for half an hour. Windows nest. For the training
        thread only.
        """
        return Window(self.progress, name)

    def saved(self, step: int) -> None:
        """Say that a checkpoint of that step is complete now."""
        self.progress.saved(step, time.time())

    def stats(self) -> Mapping[str, Any]:
        """This rank's memory and pace, for rank 0 to show; takes about a millisecond, in any thread."""
        return self._vitals.measure(time.perf_counter())

    def stall(self) -> Stall:
        """How long no step was completed, windows left out, and from when on that is a hang."""
        return self.progress.stall(time.perf_counter())

    def commands(self, step: int) -> list[JobCommand]:
        """What the job is told to do now, between two steps: usually nothing, at the cost of a look.

        Commands with a handler are carried out in here, in the calling thread; the others are
        returned, to be answered by the caller. On ranks other than 0 there is never any.
        """
        self.step = step
        if not self._arrived and not self._handed:
            return []
        return self._take()

    def unanswered(self) -> list[JobCommand]:
        """The commands that have come and are not answered; in any thread, to be looked at only."""
        return list(self._waiting.values())

    def on(self, action: str, how: str = LIVE) -> Callable[[Handler], Handler]:
        """Register a handler: ``@medic.on("job.rollback")``.

        It is called by `commands` with the `JobCommand`. Returning means applied, with the dict that
        it returns as output; raising `Rejected` or `Unsupported` answers that, any other exception
        ``failed`` (it is logged and does not leave `commands`). ``how`` is told to the server:
        ``"live"``, or ``"restart"`` where the loop has to start again.
        """
        if how not in (LIVE, RESTART):
            raise ConfigurationError(f"{action}: how is {how!r}; it can be live or restart")

        def register(handler: Handler) -> Handler:
            self._handlers[action] = handler
            self._capabilities[action] = how
            if self._writer is not None:
                self._writer.announce()
            return handler

        return register

    def cannot(self, action: str, reason: str) -> None:
        """Tell the server that this job does not carry out `action`. The reason is the answer to each such command."""
        self._refusals[action] = reason
        self._capabilities[action] = UNSUPPORTED
        self._handlers.pop(action, None)
        if self._writer is not None:
            self._writer.announce()

    def close(self) -> None:
        """Answer what is unanswered with ``failed``, say goodbye, end the threads. At most some two seconds."""
        if self._is_closed or self._pid != os.getpid():
            return  # a forked child has no threads, and its parent goes on
        self._is_closed = True
        atexit.unregister(self.close)
        if self._reader is not None:
            self._reader.stop(_CLOSE_SECONDS / 2)
        for command in list(self._handed.values()):
            command.failed("the job ended before it answered the command")
        while self._arrived:
            self._arrived.popleft().failed("the job ended before it came to the command")
        if self._writer is not None:
            self._writer.stop(_CLOSE_SECONDS)
        if self._endpoint is not None:
            self._endpoint.close()

    def __enter__(self) -> Medic:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ranks(self) -> Mapping[int, Mapping[str, Any]]:
        found = self.gather() if self.gather is not None else {}
        return {**found, self.rank: self.stats()}

    # --- carrying out ---------------------------------------------------------------------------------

    def _take(self) -> list[JobCommand]:
        now = _now()
        self._give_up_dropped(now)
        returned: list[JobCommand] = []
        held_back: list[JobCommand] = []
        for _ in range(len(self._arrived)):
            command = self._arrived.popleft()
            if now >= command.expires_at:
                self._expire(command)
            elif command.undo_of in self._waiting and command.undo_of != command.id:
                held_back.append(command)  # until it is known whether there is something to undo
            elif command.undo_of is not None and not self._was_applied(command.undo_of):
                command.applied(NOTHING_TO_UNDO)
            else:
                handler = self._handlers.get(command.action)
                self._handed[command.id] = command
                if handler is None:
                    returned.append(command)
                else:
                    self._run(handler, command)
        self._arrived.extendleft(reversed(held_back))
        return returned

    def _give_up_dropped(self, now: datetime) -> None:
        """Commands that were returned before and that the loop has let fall."""
        for command in list(self._handed.values()):
            if command.is_deferred:
                continue
            if self._handlers:
                command.unsupported()
            elif now >= command.expires_at:
                command.failed("the training loop took the command and did not answer it")

    def _run(self, handler: Callable[[JobCommand], Mapping[str, Any] | None], command: JobCommand) -> None:
        try:
            with self.window(REPAIR):
                output = handler(command)
        except Rejected as refusal:
            command.rejected(str(refusal))
        except Unsupported as refusal:
            command.unsupported(str(refusal))
        except Exception as error:
            log.exception("%s: the handler of %s failed", self.job, command.action)
            if not command.is_answered:
                command.failed(f"{type(error).__name__}: {error}")
        else:
            if not command.is_answered and not command.is_deferred:
                command.applied(output if isinstance(output, dict) else None)

    def _was_applied(self, command_id: str) -> bool:
        known = self._memory.here(command_id)
        return known is not None and known.status == envelope.APPLIED

    def _expire(self, command: JobCommand) -> None:
        """It waited too long for the loop. Never applied, so the same command may come again."""
        command.status = envelope.EXPIRED
        self._memory.forget(command.id)
        del self._waiting[command.id]
        self._send(command, {"reason": "the training loop did not come to it in time"}, forget=True)

    # --- between the threads --------------------------------------------------------------------------

    def _start(self, settings: Settings) -> None:
        outage = Outage(self.job)
        stream = envelope.job_commands(self.job)
        writing, reading = Link(settings.find_url, outage), Link(settings.find_url, outage)
        self._writer = Writer(writing, self._memory, stream, envelope.job_presence(self.job), self._describe)
        self._reader = Reader(
            reading,
            self._memory,
            self.job,
            settings.signing_key,
            self._sender,
            self._waiting,
            self._deliver,
            self._writer.put,
            _now,
        )
        self._writer.start()
        self._reader.start()

    def _deliver(self, sent: envelope.Command, parameters: Parameters | None, entry: bytes) -> None:
        command = JobCommand(sent, parameters, entry, self._conclude)
        self._waiting[command.id] = command
        if self._capabilities.get(command.action) == UNSUPPORTED:
            command.unsupported(self._refusals.get(command.action, "this job does not support it"))
            return
        self._arrived.append(command)
        if self.on_arrival is not None:
            self.on_arrival()

    def _conclude(self, command: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        if status == envelope.APPLIED and self.step is not None:
            output = {"step": self.step, **output}
        self._memory.note(command.id, Known(self._memory.owner, status, output))
        self._handed.pop(command.id, None)
        self._waiting.pop(command.id, None)
        self._send(command, output)

    def _send(self, command: JobCommand, output: Mapping[str, Any], forget: bool = False) -> None:
        assert self._writer is not None
        assert command.status is not None
        reply = envelope.Reply(command.id, self._sender(), command.status, self.rank, output, _now())
        self._writer.put(Outgoing(reply, command.entry, remember=not forget, forget=forget))

    def _sender(self) -> str:
        return f"{self.job}/{self.rank}@{self._host}"

    def _describe(self) -> Mapping[str, Any]:
        """What the presence key says. ``ranks`` are those that answer each command."""
        return {
            "job": self.job,
            "rank": self.rank,
            "world_size": self.world_size,
            "ranks": [0],
            "host": self._host,
            "pid": self._pid,
            "instance": self._memory.owner,
            "sdk": __version__,
            "capabilities": dict(self._capabilities),
            "step": self.progress.step if self.progress.step is not None else self.step,
        }


def _now() -> datetime:
    return datetime.now(timezone.utc)
