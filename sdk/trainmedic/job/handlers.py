"""Handlers of a rank's commands, called between two steps."""

from __future__ import annotations

import difflib
import logging
from contextlib import AbstractContextManager
from datetime import datetime
from itertools import islice
from typing import Any, Callable, Iterable, Mapping

from trainmedic.errors import Rejected, Unsupported, described
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import DataloaderWorkers
from trainmedic.wire import param_schema

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
"""Returns whether a command's change is active; None if unknown."""


class HandlerRegistry:
    def __init__(
        self, job: str, capabilities: dict[str, str], window: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._job = job
        self._window = window
        self.capabilities = capabilities  # `LIVE`, `RESTART` or `UNSUPPORTED` by action, for the presence
        self.handlers: dict[str, CommandHandler] = {}
        self._in_force: dict[str, InForce] = {}
        self._refusals: dict[str, str] = {}  # reason by action
        self.schemas: dict[str, Mapping[str, Any]] = {}  # of parameters, by the script's own actions
        self.in_progress: dict[str, JobCommand] = {}  # by ID; the owner of the registry removes answered ones

    def register(
        self,
        action: str,
        handler: CommandHandler,
        capability: str,
        in_force: InForce | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        self.handlers[action] = handler
        if schema is not None:
            self.schemas[action] = schema
        else:
            self.schemas.pop(action, None)  # of an earlier handler
        self._in_force[action] = in_force or _not_known
        self.capabilities[action] = capability

    def refuse(self, action: str, reason: str) -> None:
        self._refusals[action] = reason
        self.capabilities[action] = UNSUPPORTED
        self.handlers.pop(action, None)
        self.schemas.pop(action, None)

    def carry_out(self, commands: Iterable[JobCommand]) -> list[JobCommand]:
        """Call the handlers. Return the commands without one."""
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
        for command in list(self.in_progress.values()):
            if command.is_deferred:
                continue
            if self.handlers:  # a loop without handlers takes commands itself, and may answer until they expire
                hint = self._hint(command.action)
                command.unsupported(f"the training loop does not carry out {command.action}{hint}")
            elif now >= command.expires_at:
                command.failed("the training loop took the command and did not answer it")

    def refusal_reason(self, action: str) -> str | None:  # None: it can be carried out, or the loop takes all itself
        if self.capabilities.get(action) == UNSUPPORTED:
            return self._refusals.get(action, "this job does not support it")
        if self.handlers and action not in self.handlers:
            return f"there is no handler of {action}{self._hint(action)}"
        return None

    def _hint(self, action: str) -> str:
        near = difflib.get_close_matches(action, self.handlers, 1, 0.8)
        return f"; did you mean {near[0]}?" if near else ""

    def wrong_parameters(self, action: str, params: Mapping[str, Any]) -> str | None:
        """Return what does not fit a registered schema, or None. Thread-safe."""
        schema = self.schemas.get(action)
        if not schema:
            return None
        return "; ".join(islice(param_schema.problems(schema, dict(params)), 5)) or None

    def is_in_force(self, action: str, command_id: str) -> bool | None:
        """Return whether a command's change is active; None if unknown. Thread-safe."""
        try:
            return self._in_force.get(action, _not_known)(command_id)
        # Catch everything: the user's function must not end the calling thread.
        except Exception:
            log.exception("%s: cannot determine whether a %s is active", self._job, action)
            return None

    def was_applied(self, action: str, command_id: str) -> bool | None:
        """Return whether active changes prove that a command was applied; None if not known yet. Thread-safe."""
        if self._in_force.get(action, _not_known) in (_not_known, as_it_was):
            return False  # these prove nothing
        return self.is_in_force(action, command_id)

    def _call(self, handler: CommandHandler, command: JobCommand) -> None:
        try:
            with self._window():
                output = handler(command)
        except Rejected as refusal:
            command.rejected(str(refusal))
        except Unsupported as refusal:
            command.unsupported(str(refusal))
        # Catch everything: the user's handler must not end the training.
        except Exception as error:
            log.exception("%s: the handler of %s failed", self._job, command.action)
            if not command.is_answered:
                command.failed(described(error))
        else:
            if not command.is_answered and not command.is_deferred:
                command.applied(output if isinstance(output, Mapping) else None)


def _is_upper_bound(command: JobCommand) -> bool:
    return isinstance(command.parameters, DataloaderWorkers) and command.parameters.at_most is not None


def as_it_was(command_id: str) -> bool:
    """`InForce` for undos that restore a value, which may be repeated."""
    return True


def _not_known(command_id: str) -> bool | None:
    return None
