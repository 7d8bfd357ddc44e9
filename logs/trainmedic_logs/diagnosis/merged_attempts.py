"""Detection of several attempts in one log."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FAILED = re.compile(
    rb"ChildFailedError|failed \(exitcode: -?\d|Root Cause \(first observed failure\)|exits with return code = -?[1-9]"
    rb"|returned non-zero exit status|died with <Signals|srun: error: .{1,200}: tasks? |CANCELLED AT "
    rb"|(?:Worker group|Local worker group|worker group).{0,40}FAILED"
)
_STARTS = re.compile(
    rb"Setting OMP_NUM_THREADS environment variable for each process|WORLD INFO DICT|[Ss]tarting elastic_operator"
    rb"|initializing torch ?elastic|restart_count=0\b"
)
_RESTARTS = re.compile(rb"will restart worker group|restart_count=[1-9]\d{0,5}\b|Restarting worker group")
_ATTEMPT_MEMBER = re.compile(rb'"attempt": ?(\d{1,6})\b')
_STEP = re.compile(
    rb'"(?:step|global_step|current_steps)": ?(\d{1,12})\b|\biteration +(\d{1,12}) */ *\d'
    rb"|^(?:\[[^]]{1,40}\] ?)?step: *(\d{1,12}) "
)
_LAUNCHER_WORDS = re.compile(
    rb"FAILED|ChildFailed|exitcode|Root Cause|return code|exit status|Signals|srun: error|CANCELLED|OMP_NUM|WORLD INFO"
    rb"|elastic|[Rr]estart"
)  # a quick test: each pattern of a launcher above contains one
_SEARCHED_BYTES = 2048


class AttemptDetector:
    def __init__(self) -> None:
        self._has_failed = False
        self._attempt: int | None = None
        self._last_step = 0

    def take(self, raw: bytes) -> bool:
        """Take the next line; return whether it begins a further attempt."""
        raw = raw[:_SEARCHED_BYTES]
        if _LAUNCHER_WORDS.search(raw):
            return self._by_launcher(raw)
        if raw.lstrip()[:1] == b"{" and (found := _ATTEMPT_MEMBER.search(raw)):
            attempt, before = int(found[1]), self._attempt
            self._attempt = max(attempt, before or 0)
            if before is not None and attempt > before:
                self._begin_attempt()
                return True
        return self._by_step(raw)

    def _by_launcher(self, raw: bytes) -> bool:
        if _RESTARTS.search(raw):
            # torchrun announces and then reports the restart.
            is_new = self._has_failed or b"will restart" in raw  # False for the report
            self._begin_attempt()
            return is_new
        if self._has_failed and _STARTS.search(raw):
            self._begin_attempt()
            return True
        self._has_failed = self._has_failed or _FAILED.search(raw) is not None
        return False

    def _by_step(self, raw: bytes) -> bool:
        found = _STEP.search(raw)
        if not found:
            return False
        step = int(next(group for group in found.groups() if group))
        is_back = self._has_failed and step < self._last_step
        if is_back:
            self._begin_attempt()
        self._last_step = max(step, self._last_step)
        return is_back

    def _begin_attempt(self) -> None:
        self._has_failed, self._last_step = False, 0


def beginnings(lines: Iterable[bytes]) -> list[int]:
    """Return the line numbers, from 0, at which further attempts begin."""
    detector = AttemptDetector()
    return [number for number, raw in enumerate(lines) if detector.take(raw)]
