"""User code that finds faults in a rank's records.

A finding is a record of the event ``detected``, which a shipped log rule matches.
"""

from __future__ import annotations

import inspect
import logging
import os
import queue
import re
import threading
import time
from importlib import metadata
from typing import Any, Callable, Iterable, Mapping, Union

from trainmedic.errors import ConfigurationError

log = logging.getLogger("trainmedic")

GROUP = "trainmedic.detectors"
DETECTED = "detected"
LINE = "log"
"""Event of the program's log lines, which only detectors get."""
_MOST_WAITING = 1000  # records; later ones are dropped
_MOST_IN_AN_HOUR = 20  # findings of one detector
_MOST_MEMBERS = 32  # of a finding
_LONGEST_MEMBER_NAME = 60
_MOST_ERRORS = 5  # consecutive; then the detector is disabled
_MOST_DETECTORS = 32
_LONGEST_LINE = 1000  # characters
_HOUR = 3600.0
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,59}\Z", re.ASCII)

Found = Union[str, Mapping[str, Any]]  # A sentence, or a mapping with ``message``
Findings = Union[None, Found, Iterable[Found]]


Feed = Callable[[Mapping[str, Any]], Findings]  # A function, or the method ``feed`` of an object


class Detectors:
    def __init__(self, report: Callable[[str, Mapping[str, Any]], None], job: str) -> None:
        self._report = report
        self._job = job
        self._feeds: dict[str, Feed] = {}
        self._names: set[str] = set()  # also of disabled and failed ones
        self._times: dict[str, list[float]] = {}
        self._errors: dict[str, int] = {}  # consecutive
        self.error_count = 0
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="trainmedic-detectors", daemon=True)
        self._has_begun = False

    def add(self, name: str, detector: Any) -> None:
        """Add a class, an object with ``feed``, or a function; skip classes that cannot be instantiated.

        Raises ConfigurationError.
        """
        if not isinstance(name, str) or not _NAME.match(name):
            raise ConfigurationError(
                f"{name!r} cannot name a detector; use at most 60 of A-Z, a-z, 0-9, _.-, and begin with a letter or _"
            )
        if name in self._names or len(self._names) >= _MOST_DETECTORS:
            reason = "there is one already" if name in self._names else f"a rank has at most {_MOST_DETECTORS}"
            raise ConfigurationError(f"the detector {name} cannot be registered: {reason}")
        try:
            instance: Any = detector() if inspect.isclass(detector) else detector
        except Exception:  # the user's class; the training continues without it
            log.exception("%s: cannot create detector %s; skipping it", self._job, name)
            self._names.add(name)
            return
        has_method = callable(getattr(instance, "feed", None))
        if not has_method and not callable(instance):
            raise ConfigurationError(f"the detector {name} has no method feed(record), and is no function of a record")
        self._names.add(name)
        self._feeds[name] = instance.feed if has_method else instance
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()

    def feed(self, record: Mapping[str, Any]) -> None:
        if self._feeds and record.get("event") != DETECTED:
            try:
                self._waiting.put_nowait(record)
            except queue.Full:
                return

    def close(self, seconds: float) -> None:
        if not self._has_begun:
            return
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
            for name in list(self._feeds):
                self._feed_one(name, record)

    def _feed_one(self, name: str, record: Mapping[str, Any]) -> None:
        try:
            for finding in _as_iterable(self._feeds[name](record)):
                self._report_limited(name, {"message": finding} if isinstance(finding, str) else finding)
            self._errors.pop(name, None)
        except Exception:  # user code; the training continues
            self._count_failure(name)

    def _count_failure(self, name: str) -> None:
        self.error_count += 1
        count = self._errors[name] = self._errors.get(name, 0) + 1
        if count == 1:
            log.exception("%s: detector %s failed; trying it again", self._job, name)
        if count >= _MOST_ERRORS:
            log.error("%s: detector %s failed %d times in a row; disabling it", self._job, name, count)
            del self._feeds[name]

    def _report_limited(self, name: str, fields: Mapping[str, Any]) -> None:
        now = time.monotonic()
        times = [at for at in self._times.get(name, []) if now - at < _HOUR]
        self._times[name] = [*times, now][-_MOST_IN_AN_HOUR:]  # suppressed ones count too
        if len(times) < _MOST_IN_AN_HOUR:
            members = list(fields.items())[:_MOST_MEMBERS]
            self._report(name, {str(key)[:_LONGEST_MEMBER_NAME]: value for key, value in members})


class LineHandler(logging.Handler):
    """Handler that passes the program's log, but not Trainmedic's, to detectors as records ``log``. Never blocks."""

    def __init__(self, detectors: Detectors | None) -> None:
        super().__init__()
        self._detectors = detectors
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        if self._detectors is None or record.name.partition(".")[0] == log.name:
            return
        if self._pid != os.getpid():
            return  # a forked child, such as a loader worker: the queue's lock may have been held at the fork
        try:
            message = record.getMessage()[:_LONGEST_LINE]
        except Exception:  # the arguments do not fit the format; other handlers report that
            return
        level = record.levelname.lower()
        self._detectors.feed({"event": LINE, "level": level, "logger": record.name, "message": message})


def add_installed(detectors: Detectors) -> None:
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            detectors.add(point.name, point.load())
        except Exception:  # code of another package; the training continues
            log.exception("cannot load detector %s; skipping it", point.name)


def name_of(detector: Any) -> str:
    return str(getattr(detector, "__name__", type(detector).__name__))


def _as_iterable(findings: Findings) -> Iterable[Found]:
    if findings is None:
        return ()
    return (findings,) if isinstance(findings, (str, Mapping)) else findings
