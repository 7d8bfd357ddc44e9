"""Holding a training loop at a step boundary: ``job.pause`` and ``job.resume``.

`Pause.start` and `Pause.end` are called by handlers; `hold` afterwards, by the loop, which stays in there for
as long as the pause lasts and looks for commands meanwhile. Used by the frameworks' integrations.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Callable, Mapping

from trainmedic.client import Medic
from trainmedic.progress import PAUSE

_LOOK_EVERY = 0.05


class Pause:
    """The pause of one job; none to begin with."""

    def __init__(
        self, medic: Medic, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._medic = medic
        self._now = now
        self._sleep = sleep
        self._until: float | None = None

    @property
    def lasts(self) -> bool:
        return self._until is not None

    def start(self, longest: timedelta) -> Mapping[str, Any]:
        """Also while it lasts already: the new end counts."""
        self._until = self._now() + longest.total_seconds()
        return {"paused": True, "max_seconds": longest.total_seconds()}

    def end(self) -> Mapping[str, Any]:
        """Whether or not it lasts."""
        was_paused, self._until = self.lasts, None
        return {"was_paused": was_paused}

    def hold(self, step: int) -> None:
        """Return when the pause has ended, by a command or its time."""
        if self._until is None:
            return
        with self._medic.window(PAUSE):
            while self._until is not None and self._now() < self._until:
                self._sleep(_LOOK_EVERY)
                self._medic.commands(step)
        self._until = None
