"""Parameters and time limits that repairs share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from trainmedic.wire.envelope import Command
from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.errors import CommandFailed, CommandInterrupted, CommandRejected
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.repairs.programs import ProgramAnswer

SETTLED_SECONDS = 2.0
"""A restarted program must run for this time."""
LOOK_EVERY = 0.5  # seconds
_STOP_SECONDS = 5.0
"""systemd kills a stopping agent's programs at once; the agent's queues notice the stop seconds later."""


class RepairTime:
    """The time of one command, which ends early enough for its reply."""

    def __init__(self, accepted: AcceptedCommand, now: Callable[[], datetime] = utc_now) -> None:
        self._accepted = accepted
        self._now = now

    def left(self) -> float:
        """Return the seconds left, 0 or less if none."""
        return (self._accepted.deadline - self._now()).total_seconds()

    def to_act(self) -> float:
        """Return the seconds left. Raises CommandFailed if there are none."""
        if (left := self.left()) <= 0:
            raise CommandFailed("no time is left for it, so it was not begun")
        return left

    def wait_for(self, holds: Callable[[], bool]) -> bool:
        """Return whether `holds` became true in time. Raises CommandInterrupted if the agent stops."""
        while not holds():
            if self.left() <= 0:
                return False
            self.pause(LOOK_EVERY)
        return True

    def check_killed(self, answer: ProgramAnswer) -> None:
        """If the program was killed, raise CommandInterrupted if the agent stops, else CommandFailed."""
        if answer.code < 0:
            self.pause(_STOP_SECONDS)
            raise CommandFailed(f"signal {-answer.code} ended it; it may have had an effect", {"may_be_done": True})

    def pause(self, seconds: float) -> None:
        """Sleep. Raises CommandInterrupted if the agent stops."""
        until = time.monotonic() + seconds
        while True:
            if self._accepted.is_stopping():
                raise CommandInterrupted("the agent stops while it watches the repair")
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, LOOK_EVERY))


def checked_parameters(command: Command, names: Sequence[str]) -> Mapping[str, Any]:
    """Return the parameters. Raises CommandRejected for an undo, or unless exactly `names` are given as text."""
    if command.undo_of is not None:
        raise CommandRejected(f"{command.action} has no undo")
    unknown = sorted(name for name in command.params if name not in names)
    if unknown:
        known = f"; it takes {', '.join(names)}" if names else ""
        raise CommandRejected(f"{command.action} does not know {', '.join(map(repr, unknown))[:300]}{known}")
    missing = [name for name in names if not isinstance(command.params.get(name), str)]
    if missing:
        raise CommandRejected(f"{command.action} needs {' and '.join(missing)} as text")
    return command.params
