"""Detectors: classes of other packages that find in a rank's records what a log rule cannot say, such as a comparison
of many steps.

They are found by the entry point group ``trainmedic.detectors``, and run in a thread of their own beside the records:
a detector that is slow or stuck holds up neither the training nor its records, and one that raises is left out from
then on. What it finds becomes a record of the event ``detected``, which the shipped log rule of that name takes.

Who calls it: ``record_log``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from importlib import metadata
from typing import Any, Callable, Iterable, Mapping, Protocol, Union

log = logging.getLogger("trainmedic")

GROUP = "trainmedic.detectors"
DETECTED = "detected"
"""The event of the records that detectors make."""
_MOST_WAITING = 1000
_MOST_IN_AN_HOUR = 20
"""Records that one detector may make; what it finds beyond them is left out."""
_HOUR = 3600.0

Found = Union[str, Mapping[str, Any]]
"""What a detector has found: a sentence, or a mapping with ``message`` and whatever else the record is to say."""


class Detector(Protocol):
    """What a detector has. It is made once for each rank, without arguments."""

    def feed(self, record: Mapping[str, Any]) -> Iterable[Found]:
        """Take the next record of the rank, as it stands in the file, and return what is found by now."""
        ...


class Detectors:
    """The detectors that are installed, fed in the order of the records."""

    def __init__(self, made: Mapping[str, Detector], tell: Callable[[str, Mapping[str, Any]], None], job: str) -> None:
        """``tell`` takes a detector's name and the members of a record."""
        self._made = dict(made)
        self._tell = tell
        self._job = job
        self._times: dict[str, list[float]] = {}
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="trainmedic-detectors", daemon=True)
        self._thread.start()

    def feed(self, record: Mapping[str, Any]) -> None:
        """Hand a record on; where the detectors do not keep up it is left out."""
        if record.get("event") != DETECTED:
            try:
                self._waiting.put_nowait(record)
            except queue.Full:
                return

    def close(self, seconds: float) -> None:
        """Let them see the records that wait, for so long at most."""
        until = time.monotonic() + seconds
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            record = self._waiting.get()
            if record is None:
                return
            for name in list(self._made):
                self._try(name, record)

    def _try(self, name: str, record: Mapping[str, Any]) -> None:
        try:
            for found in self._made[name].feed(record):
                self._keep(name, {"message": found} if isinstance(found, str) else dict(found))
        except Exception:  # a class of another package: it is left out, and the training goes on
            log.exception("%s: the detector %s failed and is left out", self._job, name)
            del self._made[name]

    def _keep(self, name: str, fields: Mapping[str, Any]) -> None:
        now = time.monotonic()
        times = [at for at in self._times.get(name, []) if now - at < _HOUR]
        self._times[name] = [*times, now]
        if len(times) < _MOST_IN_AN_HOUR:
            self._tell(name, fields)


def installed(tell: Callable[[str, Mapping[str, Any]], None], job: str) -> Detectors | None:
    """Make the detectors that are installed; None where there are none. One that cannot be made is left out."""
    made: dict[str, Detector] = {}
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            made[point.name] = point.load()()
        except Exception:  # a class of another package: without it the training goes on
            log.exception("%s: the detector %s cannot be made and is left out", job, point.name)
    return Detectors(made, tell, job) if made else None
