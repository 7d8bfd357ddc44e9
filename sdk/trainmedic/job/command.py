"""A command as the training loop sees it, to be carried out and answered.

Not here: how it came and how the answer leaves (``queue``), who carries it out (``handlers``).
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any, Callable, Mapping

from trainmedic.job.group import Alone, Group
from trainmedic.job.parameters import Parameters
from trainmedic.wire import envelope
from trainmedic.wire.command_memory import RankOutcome
from trainmedic.wire.output import plain

log = logging.getLogger("trainmedic")

NOTHING_TO_UNDO: Mapping[str, Any] = {"nothing_to_undo": True}
"""The output of an undo that is applied although the command was not."""

OutcomeCallback = Callable[["JobCommand", str, Mapping[str, Any]], None]


class JobCommand:
    """One command to this job.

    ``action`` is its name, such as ``job.scale_lr``; ``params`` its parameters as they were sent,
    checked; ``parameters`` the same as a typed value (`trainmedic.ScaleLr` and so on), or None for
    an action that this package does not know. ``undo_of`` is set where it takes back an earlier
    command. ``group`` is for handlers of jobs with several ranks. Answer each command once, with
    `applied`, `rejected`, `unsupported` or `failed`; a second answer is logged and otherwise ignored, so
    that an answer never raises.
    """

    def __init__(
        self, sent: envelope.Command, parameters: Parameters | None, entry: bytes | None, on_outcome: OutcomeCallback
    ) -> None:
        self.sent = sent
        self.id = sent.id
        self.action = sent.action
        self.params: Mapping[str, Any] = sent.params
        self.parameters = parameters
        self.playbook = sent.playbook
        self.run_id = sent.run_id
        self.reason = sent.reason
        self.undo_of = sent.undo_of
        self.expires_at: datetime = sent.expires_at
        self.status: str | None = None
        self.is_deferred = False
        self.entry = entry
        # Handlers agree and hear from all ranks by it, where several carry the command out.
        self.group: Group = Alone()
        # The sync point at which several ranks carry it out, and its number among the commands there.
        self.sync_key: tuple[int, int] | None = None
        # The outcome of each rank; on rank 0 alone.
        self.outcomes: dict[int, RankOutcome] = {}
        self._on_outcome = on_outcome

    @property
    def is_answered(self) -> bool:
        return self.status is not None

    def applied(self, output: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """It is done. What it changed goes into the history: ``command.applied(before=0.1, after=0.05)``."""
        self.answer(envelope.APPLIED, {**(output or {}), **more})

    def rejected(self, reason: str) -> None:
        """It makes no sense here and now. It will not be tried again."""
        self.answer(envelope.REJECTED, {"reason": reason})

    def unsupported(self, reason: str = "") -> None:
        """This job cannot carry out such a command. It will not be tried again."""
        self.answer(envelope.UNSUPPORTED, {"reason": reason or f"the training loop does not carry out {self.action}"})

    def failed(self, reason: str) -> None:
        """It was tried and is not done; it may be tried again."""
        self.answer(envelope.FAILED, {"reason": reason})

    def later(self) -> None:
        """It is under way and is answered when it is done, such as after a restart of the loop.

        A handler calls it before it returns; without it, returning means applied.
        """
        self.is_deferred = True

    def answer(self, status: str, output: Mapping[str, Any]) -> None:
        """The four above in one."""
        if self.status is not None:
            log.error("command %s (%s) was answered %s; %s comes too late", self.id, self.action, self.status, status)
            return
        self.status = status
        try:
            plain_output = plain(output)
        # Every error is caught, because objects of the user's are asked what they are.
        except Exception as error:
            log.exception("the output of %s cannot be told", self.action)
            plain_output = {"reason": f"its output cannot be told: {type(error).__name__}"}
        self._on_outcome(self, status, plain_output)

    def __repr__(self) -> str:
        return f"<JobCommand {self.action} {self.id} {self.status or 'not answered'}>"
