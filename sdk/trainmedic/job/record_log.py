"""Records of a rank: JSON lines per interval of steps and per event.

The training thread only queues notes; another writes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Mapping, NamedTuple

from trainmedic.errors import text_of
from trainmedic.job import detectors, devices, ending, process_usage
from trainmedic.job.progress import Progress
from trainmedic.job.reported_values import kept
from trainmedic.job.rotating_file import RotatingFile
from trainmedic.settings import LogSettings, Settings
from trainmedic.wire.log_layout import AttemptLogs

log = logging.getLogger("trainmedic")

STEP = "step"
EPOCH = "epoch"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
CHECKPOINT_FAILED = "checkpoint_failed"
EXCEPTION = "exception"
RESTART = "restart"
COMMAND = "command"
END = "end"
INFO, WARNING, ERROR = "info", "warning", "error"

_MOST_WAITING = 1000  # notes; later ones are dropped and counted
_MOST_BYTES = 64 << 20  # of a rank's records, in both halves of the `RotatingFile`
_MOST_FILES = 32  # named by the script; later ones are ignored
_LONGEST_TEXT = 1000  # characters
_WRITE_INTERVAL_S = 0.5
_DEVICES_INTERVAL_S = 5.0  # between two searches for GPUs, until some are found
_DETECTORS_END_S = 1.0  # for waiting records at the end
_SOURCES_VERSION = 1
_OWNER_ONLY, _OWNERS_DIRECTORY = 0o600, 0o700


class Note(NamedTuple):
    at: float
    event: str
    level: str
    fields: Mapping[str, Any]


class RecordLog:
    def __init__(self, settings: Settings, logs: LogSettings, node: str, progress: Progress) -> None:
        self._progress = progress
        self._directory = AttemptLogs.of(logs.log_dir, settings.job, logs.attempt)
        self._interval = logs.interval
        self.due_at = 0  # `Progress.steps` at which the next step is recorded
        place = {"local_rank": logs.local_rank, "node_rank": logs.node_rank}
        if settings.world_size == 1:
            place = {name: 0 if number is None else number for name, number in place.items()}
        self._identity: dict[str, Any] = {"job": settings.job, "attempt": logs.attempt, "rank": settings.rank, **place}
        self._identity["node"] = node
        local_rank = place["local_rank"]
        self._sources = self._directory.sources(node, settings.rank if local_rank is None else local_rank)
        self._world_size = settings.world_size
        self._started_at = time.time()
        self._files: dict[str, str] = {}
        self._gpus: list[str] = []
        self._written_sources: tuple[Any, ...] | None = None
        self._are_sources_failing = False
        self._devices_at = float("-inf")
        self._notes: deque[Note] = deque()
        self._dropped = 0  # by the threads that add notes
        self._lost = 0  # by the writing thread
        self._reported_lost = 0
        self._epoch: int | None = None
        self._loss_step = -1  # step of the last record
        self._wake = threading.Event()
        self._is_closing = False
        self.detectors = detectors.Detectors(self.note_detected, settings.job)
        detectors.add_installed(self.detectors)
        if logs.attempt > 1 or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0"):
            self.note(RESTART)
        self._thread = threading.Thread(target=self._run, name="trainmedic-records", daemon=True)
        self._thread.start()

    # --- any thread; steps from the training thread -----------------------------------------------------

    def note_step(self, loss: Any, grad_norm: Any, epoch: Any) -> None:
        progress = self._progress
        self.due_at = progress.steps + self._interval
        fields: dict[str, Any] = {"step": progress.step}
        epoch = epoch if type(epoch) is int or (type(epoch) is float and math.isfinite(epoch)) else None
        if epoch is not None:
            fields["epoch"] = epoch
            if self._epoch != int(epoch):
                self._epoch = int(epoch)
                self.note(EPOCH, step=progress.step, epoch=self._epoch)
        newest = progress.record.newest
        if loss is not None or grad_norm is not None:
            fields["loss"], fields["grad_norm"] = kept(loss), kept(grad_norm)
        elif newest is not None and newest.step > self._loss_step:  # of a step since the last record
            fields["loss"], fields["grad_norm"] = newest.loss, newest.grad_norm
        self._loss_step = progress.step if progress.step is not None else -1
        fields["learning_rate"] = progress.learning_rate
        self._put(Note(time.time(), STEP, INFO, fields))

    def note(self, event: str, level: str = INFO, **fields: Any) -> None:
        self._put(Note(time.time(), event, level, {"step": self._progress.step, **fields}))
        self._wake.set()

    def note_error(self, error: BaseException | None) -> None:
        if error is not None and ending.failure(error) is not None:
            self.note(EXCEPTION, ERROR, error=ending.kind_of(error), message=text_of(error))

    def add_file(self, path: str, source: str) -> None:
        if len(self._files) < _MOST_FILES:
            self._files = {**self._files, path: source}
            self._wake.set()

    def close(self, error: BaseException | None, seconds: float) -> None:
        reason = ending.failure(error)
        errors = self.detectors.error_count or None
        self.note(END, INFO if reason is None else ERROR, reason=reason, detector_errors=errors)
        self._is_closing = True
        self._wake.set()
        self._thread.join(seconds)

    def note_detected(self, detector: str, fields: Mapping[str, Any]) -> None:
        named = {str(name): value for name, value in fields.items()}
        self._put(Note(time.time(), detectors.DETECTED, WARNING, {**named, "detector": detector}))
        self._wake.set()

    def _put(self, note: Note) -> None:
        if len(self._notes) < _MOST_WAITING:
            self._notes.append(note)
        else:
            self._dropped += 1

    # --- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._directory.path.mkdir(mode=_OWNERS_DIRECTORY, parents=True, exist_ok=True)
        except OSError as error:
            log.warning("%s: cannot write records: %s: %s", self._identity["job"], error.strerror, self._directory.path)
        file = RotatingFile(
            self._directory.records(self._identity["rank"]), _MOST_BYTES, f"{self._identity['job']}: the record"
        )
        is_last = False
        while not is_last:
            is_last = self._is_closing
            try:
                self._find_devices()
                self._write_sources()
                self._write_notes(file)
                if is_last:
                    self.detectors.close(_DETECTORS_END_S)
                    self._write_notes(file)
            except Exception:  # boundary of the thread: training continues, and later records are tried
                log.exception("%s: cannot write a record", self._identity["job"])
            if not is_last:
                self._wake.wait(_WRITE_INTERVAL_S)
                self._wake.clear()
        file.close()

    def _write_notes(self, file: RotatingFile) -> None:
        lines: list[bytes] = []
        failure: Exception | None = None
        lost = self._dropped + self._lost
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        pace = self._pace_fields() if any(note.event == STEP for note in notes) else {}
        for note in notes:
            fields = {**note.fields, **(pace if note.event == STEP else {})}
            if lost > self._reported_lost and not lines:
                fields["dropped"] = lost - self._reported_lost
            try:
                lines.append(self._line(note, fields))
            except Exception as error:  # a value of the user's code; the other records are written
                self._lost, failure = self._lost + 1, error
        if failure is not None:  # one for all, since each record may have the same value
            log.error("%s: cannot write a record", self._identity["job"], exc_info=failure)
        if not lines:
            return
        if file.add(b"".join(lines)):
            self._reported_lost = lost
        else:
            self._lost += len(lines)

    def _line(self, note: Note, fields: Mapping[str, Any]) -> bytes:
        at = datetime.fromtimestamp(note.at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        members = {name: readable(value) for name, value in fields.items() if value is not None}
        identity = {name: value for name, value in self._identity.items() if value is not None}
        record = {"ts": at, **identity, "level": note.level, "event": note.event}
        # A detector must not replace members of the record itself.
        record = {**members, **record} if note.event == detectors.DETECTED else {**record, **members}
        self.detectors.feed(record)
        return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    def _pace_fields(self) -> dict[str, Any]:
        values, parts = self._progress.pace.values(0.0), self._progress.pace.parts()
        fields: dict[str, Any] = {
            "tokens_per_s": values.get("training_throughput_tokens_per_second"),
            "samples_per_s": values.get("training_throughput_samples_per_second"),
            "data_s": parts.data,
            "compute_s": parts.compute,
            "wait_s": parts.wait,
        }
        cuda = process_usage.cuda_memory()
        if cuda is not None:
            fields["gpu_memory_bytes"] = cuda.allocated
            fields["gpu_memory_ratio"] = cuda.allocated / cuda.total if cuda.total else None
        elif self._progress.memory_bytes is not None:
            fields["gpu_memory_bytes"] = self._progress.memory_bytes
        return fields

    def _find_devices(self) -> None:
        now = time.monotonic()
        if not self._gpus and now - self._devices_at > _DEVICES_INTERVAL_S:
            self._devices_at = now
            self._gpus = devices.pci_addresses()

    def _write_sources(self) -> None:
        files, gpus = self._files, self._gpus
        if self._written_sources == (files, gpus):
            return
        started_at = datetime.fromtimestamp(self._started_at, timezone.utc).isoformat(timespec="seconds")
        content = {
            "version": _SOURCES_VERSION,
            **self._identity,
            "world_size": self._world_size,
            "pid": os.getpid(),
            "gpus": gpus,
            "started_at": started_at.replace("+00:00", "Z"),
            "files": [{"path": path, "source": source} for path, source in files.items()],
        }
        try:
            _replace_file(self._sources, json.dumps(content).encode())
        except OSError as error:  # tried again after the interval
            if not self._are_sources_failing:
                log.warning("%s: cannot write the sources file: %s", self._identity["job"], error.strerror)
            self._are_sources_failing = True
        else:
            self._written_sources, self._are_sources_failing = (files, gpus), False


def readable(value: Any) -> Any:
    """Return a JSON value: floats of seven digits, "NaN" and "Infinity" as texts, text of at most 1,000 characters."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()[:_LONGEST_TEXT]
    if isinstance(value, Mapping):
        return {str(name): readable(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [readable(member) for member in value]
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return "NaN"  # for an object that is no number
    if math.isfinite(number):
        return float(f"{number:.7g}")
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def _replace_file(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(unfinished, flags, _OWNER_ONLY), "wb") as file:
        file.write(content)
    unfinished.replace(path)
