"""A command as the training loop sees it, to be carried out and answered.

Not here: how it came (``reader``), how the answer leaves (``writer``).
"""

from __future__ import annotations

import logging
import math
from datetime import datetime
from typing import Any, Callable, Mapping

from trainmedic.job.group import Alone, Group
from trainmedic.job.parameters import Parameters
from trainmedic.wire import envelope
from trainmedic.wire.memory import Outcome

log = logging.getLogger("trainmedic")

_DEEPEST = 8
_LONGEST_TEXT = 4096
_MOST_MEMBERS = 1000
_LONGEST_INT = 10**1000

Conclude = Callable[["JobCommand", str, Mapping[str, Any]], None]


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
        self, sent: envelope.Command, parameters: Parameters | None, entry: bytes | None, conclude: Conclude
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
        # Where several ranks carry it out: agreeing on a value, and hearing from all of them.
        self.group: Group = Alone()
        # Which decision of the ranks it is part of, and its place there; what each has said, on rank 0.
        self.turn: tuple[int, int] | None = None
        self.outcomes: dict[int, Outcome] = {}
        self._conclude = conclude

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
            told = plain(output)
        except Exception as error:  # whatever its own objects raise when they are asked what they are
            log.exception("the output of %s cannot be told", self.action)
            told = {"reason": f"its output cannot be told: {type(error).__name__}"}
        self._conclude(self, status, told)

    def __repr__(self) -> str:
        return f"<JobCommand {self.action} {self.id} {self.status or 'not answered'}>"


def plain(output: Mapping[str, Any]) -> dict[str, Any]:
    """`output` as JSON can carry it: numbers of any library as numbers, what is not known as text."""
    return {str(name)[:_LONGEST_TEXT]: _plain(value, 1) for name, value in list(output.items())[:_MOST_MEMBERS]}


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):  # Python does not write out longer ones
        return int(value) if abs(value) < _LONGEST_INT else "a whole number too long to be told"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return str(value)[:_LONGEST_TEXT]
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(name): _plain(member, depth + 1) for name, member in list(value.items())[:_MOST_MEMBERS]}
    if depth < _DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(member, depth + 1) for member in list(value)[:_MOST_MEMBERS]]
    item = getattr(value, "item", None)  # a tensor or array of one element
    if callable(item):
        try:
            return _plain(item(), _DEEPEST)
        except (TypeError, ValueError, RuntimeError):
            pass
    return str(value)[:_LONGEST_TEXT]
