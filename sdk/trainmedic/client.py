"""`connect` and `Medic`. Only background threads use Redis."""

from __future__ import annotations

import atexit
import os
import socket
import time
from types import TracebackType
from typing import Any, Callable, Mapping, TypeVar

from trainmedic.errors import ConfigurationError
from trainmedic.job import devices, ending, record_log
from trainmedic.job.command import JobCommand
from trainmedic.job.connect_options import check_numbers, check_options, check_targets, check_url
from trainmedic.job.group import Group, SingleRankGroup
from trainmedic.job.handlers import LIVE, RESTART, HandlerRegistry, InForce
from trainmedic.job.loss_spread import loss_spread
from trainmedic.job.metrics import MetricsEndpoint
from trainmedic.job.parameters import ACTIONS, LARGEST_LR_SCALE, Rollback
from trainmedic.job.progress import HANG_FLOOR, REPAIR, STARTUP_FLOOR, Progress
from trainmedic.job.queue import CommandQueue
from trainmedic.job.rank_stats import RankStats
from trainmedic.job.record_log import RecordLog
from trainmedic.job.reported_values import whole
from trainmedic.job.reports import JobReports
from trainmedic.job.server_connection import ServerConnection, pod_namespace
from trainmedic.job.status_file import begin_status_file
from trainmedic.ranks.share import LocalRank, Share
from trainmedic.ranks.shared_store import KeyValueStore
from trainmedic.settings import LogSettings, Settings, resolve, resolve_logs, slurm_job
from trainmedic.wire import envelope, evaluations, param_schema

Handler = TypeVar("Handler", bound=Callable[[JobCommand], "Mapping[str, Any] | None"])

_CLOSE_SECONDS = 2.0  # to send the last answers; each other wait of `close` takes at most half


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
    largest_lr_scale: float = LARGEST_LR_SCALE,
    layer_norms: int = 0,
    log_dir: str | os.PathLike[str] | None = None,
    log_interval: int = 10,
    target_samples_per_second: float | None = None,
    target_tokens_per_second: float | None = None,
) -> Medic:
    """Connect a training job. Returns at once, with or without Redis.

    Missing arguments come from the environment: TRAINMEDIC_JOB, TRAINMEDIC_REDIS_URL, TRAINMEDIC_SIGNING_KEY or _FILE;
    rank and world size from torchrun, Open MPI or Slurm. Without a URL, that of a server of the same user on this
    machine is used.

    - ``job``: the alerts' ``job_name``.
    - ``metrics_port``: Prometheus endpoint on rank 0, without a password; 0 picks a free port.
    - ``metrics_host``: its address, ``"0.0.0.0"`` for all.
    - ``capabilities``: ``"live"``, ``"restart"`` or ``"unsupported"`` per action; the last is answered without the
      loop.
    - ``hang_floor``: seconds without a report that count as a hang, or five times the usual interval if longer.
    - ``startup_floor``: the same before there is a usual one, and for windows (`window`).
    - ``largest_lr_scale``: larger multiples of the script's learning rate are rejected.
    - ``layer_norms``: number of layers with an exported gradient norm: non-finite, then the largest ones.
    - ``log_dir``, else TRAINMEDIC_LOG_DIR: directory of each rank's records, JSON lines every ``log_interval`` steps
      and per event; none without it.
    - ``target_samples_per_second``, ``target_tokens_per_second``: target throughput of all ranks (alert
      TrainingBelowTarget).

    Raises ConfigurationError.
    """
    logs = resolve_logs(log_dir, log_interval)
    settings = resolve(job, redis_url, signing_key, rank, world_size)
    check_options(capabilities or {}, largest_lr_scale, layer_norms)
    check_numbers(metrics_port, hang_floor=hang_floor, startup_floor=startup_floor)
    targets = check_targets(samples=target_samples_per_second, tokens=target_tokens_per_second)
    check_url(settings)
    progress = Progress(time.perf_counter(), hang_floor, startup_floor, layer_norms)
    progress.targets = targets
    return Medic(settings, dict(capabilities or {}), metrics_port, metrics_host, progress, largest_lr_scale, logs)


class Medic(JobReports):
    """A connected job, made by `connect`. Its context closes it."""

    def __init__(
        self,
        settings: Settings,
        capabilities: dict[str, str],
        metrics_port: int | None,
        metrics_host: str,
        progress: Progress,
        largest_lr_scale: float = LARGEST_LR_SCALE,
        logs: LogSettings | None = None,
    ) -> None:
        self._node = os.environ.get("TRAINMEDIC_NODE") or socket.gethostname()
        super().__init__(progress, RecordLog(settings, logs, self._node, progress) if logs is not None else None)
        self.largest_lr_scale = largest_lr_scale
        self.job = settings.job
        self.rank = settings.rank
        self.world_size = settings.world_size
        # Returns live ranks' `stats`, on rank 0 only; elsewhere nothing. None before `share`.
        self.gather: Callable[[], Mapping[int, Mapping[str, Any]]] | None = None
        self.step: int | None = None  # of the last `commands` or `is_quiet`, or of a rollback; None before
        self.share: Share | None = None  # None before `join_ranks`
        # Called in the receiver's thread when a command waits for the loop.
        self.on_arrival: Callable[[], None] | None = None
        self._host = socket.gethostname()
        self._namespace = pod_namespace()
        self._slurm = slurm_job(os.environ)
        self._stats = RankStats(progress, self._node)
        self._handlers = HandlerRegistry(self.job, capabilities, lambda: self.window(REPAIR))
        self._pid = os.getpid()
        self._is_closed = False
        self._error: BaseException | None = None  # error that left the context; without it `ending.fatal_error` counts
        self._endpoint: MetricsEndpoint | None = None  # on rank 0, if a port was given
        # Only on rank 0. With several ranks it receives commands from `join_ranks` or the first `commands` on,
        # when it is known which ranks answer.
        self._server: ServerConnection | None = None
        self._queue: CommandQueue | None = None
        self._is_receiving = True
        self._status_file = begin_status_file(progress, self.rank, self._waiting_rollbacks)
        atexit.register(self.close)
        if self.rank != 0:
            return
        if metrics_port is not None:
            self._endpoint = MetricsEndpoint(
                self.job, self.progress, self._stats_by_rank, metrics_host, metrics_port, self._evaluated_metrics
            )
        self._is_receiving = self.world_size == 1
        self._server = ServerConnection(settings, self._handlers, self._report_outcome, self._describe)
        self._queue = self._server.queue
        self._queue.on_arrival = lambda: self.on_arrival() if self.on_arrival is not None else None
        self._server.writer.start()
        if self._is_receiving:
            self._server.receiver.start()

    @property
    def metrics_port(self) -> int | None:
        return self._endpoint.port if self._endpoint else None

    # --- training loop --------------------------------------------------------------------------------

    def stats(self) -> Mapping[str, Any]:
        """Return this rank's memory and pace in about a millisecond; thread-safe."""
        figures = self._stats.measure(time.perf_counter())
        if 0 < self.rank == self.world_size - 1 and self.progress.evaluated:
            # With pipeline parallelism only the last rank knows the evaluation's loss.
            figures[evaluations.FIELD] = evaluations.as_plain(self.progress.evaluated_metrics())
        return figures

    def commands(self, step: int) -> list[JobCommand]:
        """Carry out due commands between two steps. Takes a microsecond without commands.

        Handlers run in the calling thread. Commands without one are returned, and the caller must answer them. With
        `share` every rank gets the same ones, otherwise only rank 0.
        """
        if type(step) is not int:  # NumPy's number, or a tensor
            step = whole(step) or 0
        self.step = step
        if not self._is_receiving:
            self._begin_receiving()
        handlers = self._handlers
        if handlers.in_progress:
            handlers.fail_unanswered(envelope.utc_now())
        if self.share is not None:
            due = self.share.tick(step)
        elif self._queue is not None and self._queue.has_work:
            due = self._queue.take_due(envelope.utc_now())
        else:
            return []
        return handlers.carry_out(due) if due else []

    def is_quiet(self, step: int) -> bool:
        """Note the step. Return whether `commands` can be left out, never with `share`."""
        self.step = step
        is_alone = self._is_receiving and self.share is None
        return is_alone and not self._handlers.in_progress and self._queue is not None and not self._queue.has_work

    def unanswered(self) -> list[JobCommand]:
        """Return the unanswered commands, read-only; on other ranks than 0 those agreed on. Thread-safe."""
        waiting = self._queue.waiting if self._queue is not None else self._handlers.in_progress
        return list(waiting.values())

    def _waiting_rollbacks(self) -> list[str]:
        # A deferred one is being carried out already.
        return [
            command.id
            for command in self.unanswered()
            if isinstance(command.parameters, Rollback) and not command.is_deferred
        ]

    def on(
        self,
        action: str,
        how: str = LIVE,
        in_force: InForce | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Callable[[Handler], Handler]:
        """Register a handler for `commands`: ``@medic.on("job.rollback")``.

        The returned dict is the output of ``applied``. `Rejected` and `Unsupported` answer that; other exceptions are
        logged and answer ``failed``. ``how`` is ``"live"``, or ``"restart"`` if the loop must restart. ``in_force``,
        called in any thread, returns whether the change of a command's ID is active; None if unknown. Without it, the
        undo of a forgotten command stays pending until a user closes it.

        A command of one's own, such as ``acme.skip_shard``, is sent by the playbook action ``job.command``.
        ``schema``, in the subset of JSON Schema of `trainmedic.wire.param_schema`, is announced with it; other
        parameters are answered with ``rejected``.
        """
        if schema is not None:
            _check_schema(action, schema)
        if how not in (LIVE, RESTART):
            raise ConfigurationError(f"{action}: how is {how!r}; it can be live or restart")

        def register(handler: Handler) -> Handler:
            self._handlers.register(action, handler, how, in_force, schema)
            self._announce()
            return handler

        return register

    def cannot(self, action: str, reason: str) -> None:
        """Answer commands of `action` with ``unsupported`` and the reason."""
        self._handlers.refuse(action, reason)
        self._announce()

    def group(self, name: str) -> Group:
        """Return the group of all ranks, or without `share` of this one. Every rank passes the same name."""
        return self.share.group(name) if self.share is not None else SingleRankGroup()

    def join_ranks(
        self,
        store: KeyValueStore,
        gpu: Callable[[], str | None],
        every: int | None,
        patience: float,
        call_patience: float,
    ) -> Share:
        """Implement `trainmedic.distributed.share`. Raises ConfigurationError."""
        if self.share is not None or self._is_closed:
            raise ConfigurationError("share() is called once, before the job is closed")
        if self._queue is not None:
            self._queue.ranks = range(self.world_size)

        def location() -> Mapping[str, Any]:
            return {"node": self._node, "host": self._host, "gpu": gpu()}

        handlers, queue, on_outcome = self._handlers, self._queue, self._report_outcome
        local = LocalRank(self.job, self.rank, self.world_size, handlers, queue, on_outcome, location, self.stats)
        self.share = Share(store, local, every, patience, call_patience)
        self.gather = self.share.gather
        if not self._is_receiving:
            self._begin_receiving()
        else:
            self._announce()
        return self.share

    def close(self) -> None:
        """Answer open commands, notify server, ranks and launcher, and end the threads."""
        if self._is_closed or self._pid != os.getpid():
            return  # a forked child has no threads; its parent continues
        self._is_closed = True
        atexit.unregister(self.close)
        # First, because the launcher may end this process at once.
        error = self._error if self._error is not None else ending.fatal_error()
        ending.write_error_file(error)
        if self.records is not None:
            self.records.note_error(error)
        if self._server is not None and self._is_receiving:
            self._server.receiver.stop(_CLOSE_SECONDS / 2)
        for command in list(self._handlers.in_progress.values()):
            command.end("the job ended before it answered the command")
        if self.share is not None:
            self.share.close(_CLOSE_SECONDS / 2)
        if self._server is not None:
            self._server.close(_CLOSE_SECONDS, error)
        if self._endpoint is not None:
            self._endpoint.close()
        if self._status_file is not None:
            self._status_file.close()
        if self.records is not None:
            self.records.close(error, _CLOSE_SECONDS / 2)

    def __enter__(self) -> Medic:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._error = error
        self.close()

    def _evaluated_metrics(self) -> tuple[evaluations.EvaluatedMetric, ...]:
        own = self.progress.evaluated_metrics()
        if own or self.gather is None:
            return own
        return evaluations.read(self.gather().get(self.world_size - 1, {}).get(evaluations.FIELD))

    def _stats_by_rank(self) -> Mapping[int, Mapping[str, Any]]:
        return {**(self.gather() if self.gather is not None else {}), self.rank: self.stats()}

    def _loss_spread(self) -> dict[str, Any] | None:
        others = self.gather() if self.gather is not None else {}
        return loss_spread({**others, self.rank: self._stats.own_loss()})

    # --- other threads and ranks ----------------------------------------------------------------------

    def _begin_receiving(self) -> None:
        assert self._server is not None
        self._is_receiving = True
        self._server.receiver.start()
        self._server.writer.announce()

    def _announce(self) -> None:
        if self._server is not None:
            self._server.writer.announce()

    def _report_outcome(self, command: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        if status == envelope.APPLIED and self.step is not None:
            output = {"step": self.step, **output}
        self._handlers.in_progress.pop(command.id, None)
        if self.records is not None:
            self.records.note(record_log.COMMAND, action=command.action, id=command.id, status=status)
        if self.share is not None and command.sync_key is not None:
            self.share.report_outcome(command, status, output)
        elif self._queue is not None:
            self._queue.close(command, status, output)

    def _describe(self) -> Mapping[str, Any]:
        """Return the job's presence, for the server."""
        # With several ranks `Share` has the placement.
        own_placement = {"placement": devices.placement(self._node)} if self.world_size == 1 else {}
        return {
            "world_size": self.world_size,
            # Before it is known which ranks answer, the server must expect all.
            "ranks": [0] if self._is_receiving else list(range(self.world_size)),
            **(self.share.describe() if self.share is not None else own_placement),
            "capabilities": dict(self._handlers.capabilities),
            **({"schemas": dict(self._handlers.schemas)} if self._handlers.schemas else {}),
            "interrupts_hangs": self.on_arrival is not None,
            **({"namespace": self._namespace} if self._namespace is not None else {}),
            **({"slurm": self._slurm} if self._slurm is not None else {}),
            **({evaluations.FIELD: evaluations.as_plain(metrics)} if (metrics := self._evaluated_metrics()) else {}),
            "step": self.progress.step if self.progress.step is not None else self.step,
            **({"losses": losses} if (losses := self._loss_spread()) is not None else {}),
            **self.progress.shown(time.perf_counter()),
        }


def _check_schema(action: str, schema: Mapping[str, Any]) -> None:
    if action in ACTIONS:
        raise ConfigurationError(f"{action} has fixed parameters; schema is only for commands of one's own")
    try:
        param_schema.check(schema)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{action}: {error}") from error
