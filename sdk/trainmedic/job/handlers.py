"""The handlers of a rank's commands: registering them, and carrying out commands with them.

Called in the training thread, between two steps. What a handler answers goes back by the command itself
(``command``).
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, Callable, Iterable, Mapping

from trainmedic.errors import Rejected, Unsupported
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import DataloaderWorkers

log = logging.getLogger("trainmedic")

LIVE = "live"
RESTART = "restart"
UNSUPPORTED = "unsupported"
NO_UPPER_BOUND = (
    "this training loop takes commands itself, and may know job.dataloader_workers by its count alone; "
    'register a handler with @medic.on("job.dataloader_workers") for at_most'
)

CommandHandler = Callable[[JobCommand], "Mapping[str, Any] | None"]
InForce = Callable[[str], "bool | None"]
"""Whether what a command of this id has changed is in force; None where that is not known."""


class HandlerRegistry:
    """The handlers of one rank, and the commands that are in progress there.

    ``window`` makes the window of the job's progress in which each handler runs.
    """

    def __init__(
        self, job: str, capabilities: dict[str, str], window: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._job = job
        self._window = window
        self.capabilities = capabilities
        """How each action is carried out: live, by a restart, or not at all."""
        self.handlers: dict[str, CommandHandler] = {}
        self._in_force: dict[str, InForce] = {}
        self._refusals: dict[str, str] = {}
        self.in_progress: dict[str, JobCommand] = {}
        """The commands that a handler or the training loop has, and did not answer yet, by id."""

    def register(self, action: str, handler: CommandHandler, capability: str, in_force: InForce | None = None) -> None:
        self.handlers[action] = handler
        self._in_force[action] = in_force or _not_known
        self.capabilities[action] = capability

    def refuse(self, action: str, reason: str) -> None:
        """Refuse `action` on this rank from now on."""
        self._refusals[action] = reason
        self.capabilities[action] = UNSUPPORTED
        self.handlers.pop(action, None)

    def carry_out(self, commands: Iterable[JobCommand]) -> list[JobCommand]:
        """Call the handler of each command. Those that have no handler are returned."""
        returned = []
        for command in commands:
            self.in_progress[command.id] = command
            handler = self.handlers.get(command.action)
            if handler is None and _is_upper_bound(command):
                command.unsupported(NO_UPPER_BOUND)
            elif handler is None:
                returned.append(command)
            else:
                self._call(handler, command)
        return returned

    def fail_unanswered(self, now: datetime) -> None:
        """Answer the commands that `carry_out` has returned to the loop, and that the loop did not answer."""
        for command in list(self.in_progress.values()):
            if command.is_deferred:
                continue
            if self.handlers:
                command.unsupported()
            elif now >= command.expires_at:
                command.failed("the training loop took the command and did not answer it")

    def refusal_reason(self, action: str) -> str | None:
        """The reason why this rank refuses `action`; None if it would carry it out, or the loop decides."""
        if self.capabilities.get(action) == UNSUPPORTED:
            return self._refusals.get(action, "this job does not support it")
        if self.handlers and action not in self.handlers:
            return f"there is no handler of {action}"
        return None

    def is_in_force(self, action: str, command_id: str) -> bool | None:
        """Whether the handler of `action` would have something to take back of that command; None where only the
        memory of commands can tell. Any thread may call it."""
        try:
            return self._in_force.get(action, _not_known)(command_id)
        # Every error is caught, because the user's function must not end the thread that asks.
        except Exception:
            log.exception("%s: whether a %s is in force cannot be told", self._job, action)
            return None

    def was_applied(self, action: str, command_id: str) -> bool | None:
        """Whether the record of what is in force proves that a command was applied, which an earlier process may have
        died over; None where that record is not there yet. Any thread may call it."""
        if self._in_force.get(action, _not_known) in (_not_known, as_it_was):
            return False
        return self.is_in_force(action, command_id)

    def _call(self, handler: CommandHandler, command: JobCommand) -> None:
        try:
            with self._window():
                output = handler(command)
        except Rejected as refusal:
            command.rejected(str(refusal))
        except Unsupported as refusal:
            command.unsupported(str(refusal))
        # Every error is caught, because the user's handler must not end the training.
        except Exception as error:
            log.exception("%s: the handler of %s failed", self._job, command.action)
            if not command.is_answered:
                command.failed(_text(error))
        else:
            if not command.is_answered and not command.is_deferred:
                command.applied(output if isinstance(output, dict) else None)


def _is_upper_bound(command: JobCommand) -> bool:
    """Return whether a loop of an earlier release would look for a ``count`` in this command."""
    return isinstance(command.parameters, DataloaderWorkers) and command.parameters.at_most is not None


def as_it_was(command_id: str) -> bool:
    """`InForce` for an action whose undo sets a value as it was, which does no harm where it is so already."""
    return True


def _not_known(command_id: str) -> bool | None:
    return None


def _text(error: BaseException) -> str:
    """The type and text of an exception, or its type alone where it cannot be written out."""
    try:
        return f"{type(error).__name__}: {error}"
    # Every error is caught, because the text is made by code of the user's.
    except Exception:
        return type(error).__name__
