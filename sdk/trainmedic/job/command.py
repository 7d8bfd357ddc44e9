"""A command as the training loop sees it, to be carried out and answered.

Not here: how it came and how the answer leaves (``queue``), who carries it out (``handlers``).
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any, Callable, Mapping

from trainmedic.job.group import Group, SingleRankGroup
from trainmedic.job.parameters import Parameters
from trainmedic.wire import envelope
from trainmedic.wire.command_book import RankOutcome
from trainmedic.wire.output import plain

log = logging.getLogger("trainmedic")

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
        self.answer_at_end: Callable[[], None] | None = None
        self.entry = entry
        # The ranks that carry out the command together; a handler agrees with them through it.
        self.group: Group = SingleRankGroup()
        # With several ranks: the number of the sync point where it is carried out, and its index there.
        self.sync_key: tuple[int, int] | None = None
        # The outcome of each rank. Only rank 0 fills it.
        self.outcomes: dict[int, RankOutcome] = {}
        self._on_outcome = on_outcome

    @property
    def _job(self) -> Any:
        return self.sent.target.get("job")

    @property
    def is_answered(self) -> bool:
        return self.status is not None

    def applied(self, output: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Answer that it is done. The history keeps what it changed: ``command.applied(before=0.1, after=0.05)``."""
        self.answer(envelope.APPLIED, {**(output or {}), **more})

    def rejected(self, reason: str) -> None:
        """Answer that it makes no sense here and now. It will not be tried again."""
        self.answer(envelope.REJECTED, {"reason": reason})

    def unsupported(self, reason: str = "") -> None:
        """Answer that this job cannot carry out such a command. It will not be tried again."""
        self.answer(envelope.UNSUPPORTED, {"reason": reason or f"the training loop does not carry out {self.action}"})

    def failed(self, reason: str) -> None:
        """Answer that it was tried without success. It may be tried again."""
        self.answer(envelope.FAILED, {"reason": reason})

    def later(self, answer_at_end: Callable[[], None] | None = None) -> None:
        """Say that the command is answered later, such as after a restart of the loop.

        A handler calls this before it returns; otherwise returning means applied. Where the job ends first,
        ``answer_at_end`` is called to answer; without it, the answer is ``failed``.
        """
        self.is_deferred, self.answer_at_end = True, answer_at_end

    def end(self, reason: str) -> None:
        """Answer because the job ends, unless it was answered."""
        if self.answer_at_end is not None and not self.is_answered:
            self.answer_at_end()
        if not self.is_answered:
            self.failed(reason)

    def answer(self, status: str, output: Mapping[str, Any]) -> None:
        """Answer with any of the four statuses above."""
        if self.status is not None:
            message = "%s: command %s (%s) was answered %s; %s comes too late"
            log.error(message, self._job, self.id, self.action, self.status, status)
            return
        self.status = status
        try:
            plain_output = plain(output)
        # Every error is caught, because converting the user's objects calls methods of theirs.
        except Exception as error:
            log.exception("%s: the output of %s cannot be told", self._job, self.action)
            plain_output = {"reason": f"its output cannot be told: {type(error).__name__}"}
        self._on_outcome(self, status, plain_output)

    def __repr__(self) -> str:
        return f"<JobCommand {self.action} {self.id} {self.status or 'not answered'}>"
