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

    ``parameters`` is the typed form of ``params``, None for unknown actions. ``undo_of``: the ID of the command to
    revert. Only the first answer counts.
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
        self.answer_at_end: Callable[[], None] | None = None  # see `later`
        self.entry = entry  # ID on the stream; None on ranks other than 0
        # The ranks that carry out the command together.
        self.group: Group = SingleRankGroup()
        # With several ranks: number of the sync point, and index within it.
        self.sync_key: tuple[int, int] | None = None
        # Outcome per rank, on rank 0 only.
        self.outcomes: dict[int, RankOutcome] = {}
        self._on_outcome = on_outcome

    @property
    def _job(self) -> Any:
        return self.sent.target.get("job")

    @property
    def is_answered(self) -> bool:
        return self.status is not None

    def applied(self, output: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Answer that it is done, with output for the history: ``command.applied(before=0.1, after=0.05)``."""
        self.answer(envelope.APPLIED, {**(output or {}), **more})

    def rejected(self, reason: str) -> None:
        """Answer that the command makes no sense here and now."""
        self.answer(envelope.REJECTED, {"reason": reason})

    def unsupported(self, reason: str = "") -> None:
        """Answer that this job cannot carry out such commands."""
        self.answer(envelope.UNSUPPORTED, {"reason": reason or f"the training loop does not carry out {self.action}"})

    def failed(self, reason: str) -> None:
        """Answer that the attempt failed; it may be repeated."""
        self.answer(envelope.FAILED, {"reason": reason})

    def later(self, answer_at_end: Callable[[], None] | None = None) -> None:
        """Announce that the answer follows later, such as after a restart of the loop.

        Call it before the handler returns, as returning means applied. If the job ends first, ``answer_at_end``
        answers; without it the answer is ``failed``.
        """
        self.is_deferred, self.answer_at_end = True, answer_at_end

    def end(self, reason: str) -> None:
        """Answer an unanswered command, because the job ends."""
        if self.answer_at_end is not None and not self.is_answered:
            try:
                self.answer_at_end()
            # Catch everything: the user's function must not prevent the answers of other commands.
            except Exception:
                log.exception("%s: the answer at the end to %s failed", self._job, self.action)
        if not self.is_answered:
            self.failed(reason)

    def answer(self, status: str, output: Mapping[str, Any]) -> None:
        if self.status is not None:
            message = "%s: command %s (%s) was answered %s; %s comes too late"
            log.error(message, self._job, self.id, self.action, self.status, status)
            return
        self.status = status
        try:
            plain_output = plain(output)
        # Catch everything: conversion calls methods of the user's objects.
        except Exception as error:
            log.exception("%s: cannot convert the output of %s", self._job, self.action)
            plain_output = {"reason": f"its output cannot be converted: {type(error).__name__}"}
        self._on_outcome(self, status, plain_output)

    def __repr__(self) -> str:
        return f"<JobCommand {self.action} {self.id} {self.status or 'not answered'}>"
