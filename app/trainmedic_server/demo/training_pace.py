from __future__ import annotations

import time

STEP_SECONDS = 0.1


class StepPace:
    def __init__(self) -> None:
        self._due = time.monotonic()

    def wait(self) -> None:
        """Sleep until the next step is due. Lost time is not made up for."""
        self._due = max(self._due + STEP_SECONDS, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))
