"""Holding a training loop at a step boundary: ``job.pause`` and ``job.resume``.

`LoopPause.start` and `LoopPause.end` are called by handlers; `hold` afterwards, by the loop, which stays in there for
as long as the pause lasts and looks for commands meanwhile. Used by the frameworks' integrations.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any, Callable, Mapping

from trainmedic.client import Medic
from trainmedic.job.progress import PAUSE

_LOOK_EVERY = 0.05


class LoopPause:
    """The pause of one job; none to begin with.

    Its time is counted in looks for commands, not by a clock: the ranks of a job look equally often, and so
    come out of it together.
    """

    def __init__(self, medic: Medic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._medic = medic
        self._sleep = sleep
        self._looks = 0

    @property
    def lasts(self) -> bool:
        return self._looks > 0

    def start(self, longest: timedelta) -> Mapping[str, Any]:
        """Also while it lasts already: the new end counts."""
        self._looks = math.ceil(longest.total_seconds() / _LOOK_EVERY)
        return {"max_seconds": longest.total_seconds()}

    def end(self) -> Mapping[str, Any]:
        """Whether or not it lasts."""
        was_paused, self._looks = self.lasts, 0
        return {"was_paused": was_paused}

    def hold(self, step: int) -> None:
        """Return when the pause has ended, by a command or its time."""
        if not self.lasts:
            return
        with self._medic.window(PAUSE):
            while self.lasts:
                self._sleep(_LOOK_EVERY)
                self._looks -= 1
                self._medic.commands(step)
