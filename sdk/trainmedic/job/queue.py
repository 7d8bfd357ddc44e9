"""Commands between their arrival and their answer: who waits, who has expired, whose turn it is.

`Desk` is rank 0's, where commands arrive. `Hands`, on every rank, carries them out. `Answers` composes the
replies, one of every rank that owes one, and hands them to the writer: where the ranks never came to a command
(it was refused, or had expired), rank 0 says the same for all of them. Not here: how several ranks agree on whose
turn it is (``agreement``), and Redis.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from typing import Any, Callable, Iterable, Mapping, Sequence

from trainmedic.errors import Rejected, Unsupported
from trainmedic.job.command import Conclude, JobCommand
from trainmedic.job.parameters import Parameters
from trainmedic.wire import envelope
from trainmedic.wire.memory import Known, Memory, Outcome
from trainmedic.wire.writer import LARGEST_REPLY, Outgoing, too_large

log = logging.getLogger("trainmedic")

UNSUPPORTED = "unsupported"
NOTHING_TO_UNDO: Mapping[str, Any] = {"nothing_to_undo": True}
_LARGEST_OUTPUT = LARGEST_REPLY - 1024
TOO_LATE = "the training loop did not come to it in time"

CommandHandler = Callable[[JobCommand], "Mapping[str, Any] | None"]


class Hands:
    """The handlers of one rank, and what was handed to the training loop."""

    def __init__(self, job: str, capabilities: dict[str, str], window: Callable[[], AbstractContextManager[Any]]):
        self._job = job
        self._window = window
        self.capabilities = capabilities
        self.handlers: dict[str, CommandHandler] = {}
        self.refusals: dict[str, str] = {}
        # Handed to the training loop and not answered.
        self.handed: dict[str, JobCommand] = {}

    def refuse(self, action: str, reason: str) -> None:
        """The rank does not carry out `action`."""
        self.refusals[action] = reason
        self.capabilities[action] = UNSUPPORTED
        self.handlers.pop(action, None)

    def carry_out(self, commands: Iterable[JobCommand]) -> list[JobCommand]:
        """Those that have no handler are returned."""
        returned = []
        for command in commands:
            self.handed[command.id] = command
            handler = self.handlers.get(command.action)
            if handler is None:
                returned.append(command)
            else:
                self._run(handler, command)
        return returned

    def give_up_dropped(self, now: datetime) -> None:
        """Commands that were returned before and that the loop has let fall."""
        for command in list(self.handed.values()):
            if command.is_deferred:
                continue
            if self.handlers:
                command.unsupported()
            elif now >= command.expires_at:
                command.failed("the training loop took the command and did not answer it")

    def cannot(self, action: str) -> str | None:
        """Why this rank would not carry out `action`; None where it would, or where the loop decides."""
        if self.capabilities.get(action) == UNSUPPORTED:
            return self.refusals.get(action, "this job does not support it")
        if self.handlers and action not in self.handlers:
            return f"there is no handler of {action}"
        return None

    def _run(self, handler: CommandHandler, command: JobCommand) -> None:
        try:
            with self._window():
                output = handler(command)
        except Rejected as refusal:
            command.rejected(str(refusal))
        except Unsupported as refusal:
            command.unsupported(str(refusal))
        except Exception as error:
            log.exception("%s: the handler of %s failed", self._job, command.action)
            if not command.is_answered:
                command.failed(told(error))
        else:
            if not command.is_answered and not command.is_deferred:
                command.applied(output if isinstance(output, dict) else None)


class Answers:
    """Made by rank 0; its methods may be called from any thread and wait for nothing."""

    def __init__(self, job: str, host: str, owner: str, put: Callable[[Outgoing], object]) -> None:
        self._job = job
        self._owner = owner
        self._put = put
        self.ranks: Sequence[int] = (0,)
        self.hosts: Mapping[int, str] = {0: host}

    def known(self, status: str, output: Mapping[str, Any]) -> Known:
        """An outcome that is the same on all ranks."""
        return Known(self._owner, status, output)

    def accept(self, command_id: str) -> None:
        """The job has the command. Said by rank 0 alone."""
        self._put(Outgoing((self._reply(command_id, 0, (envelope.ACCEPTED, {})),)))

    def give(
        self, command_id: str, known: Known, entry: bytes | None, remember: bool = False, forget: bool = False
    ) -> None:
        """The final reply of every rank; then the entry is off the stream."""
        ranks = sorted({*self.ranks, *known.ranks})
        replies = tuple(self._reply(command_id, rank, known.of_rank(rank)) for rank in ranks)
        self._put(Outgoing(replies, entry, known if remember else None, forget))

    def tell(self, command_id: str, outcomes: Mapping[int, Outcome]) -> None:
        """What some ranks have said by now. The command stays on the stream."""
        replies = tuple(self._reply(command_id, rank, outcome) for rank, outcome in sorted(outcomes.items()))
        if replies:
            self._put(Outgoing(replies))

    def conclude(self, command_id: str, known: Known, entry: bytes | None, untold: Iterable[int]) -> None:
        """Every rank has answered; the replies of those that were not told yet go out with it."""
        replies = tuple(self._reply(command_id, rank, known.of_rank(rank)) for rank in sorted(untold))
        self._put(Outgoing(replies or (self._reply(command_id, 0, known.of_rank(0)),), entry, known))

    def _reply(self, command_id: str, rank: int, outcome: Outcome) -> envelope.Reply:
        status, output = outcome
        sender = f"{self._job}/{rank}"
        if rank in self.hosts:
            sender += f"@{self.hosts[rank]}"
        return envelope.Reply(command_id, sender, status, rank, output, datetime.now(timezone.utc))


class Desk:
    """Rank 0's: filled by the reader, emptied by whoever says whose turn it is (one thread)."""

    def __init__(
        self, memory: Memory, answers: Answers, hands: Hands, conclude: Conclude, arrived: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._hands = hands
        self._conclude = conclude
        self._tell = arrived
        self.answers = answers
        self.arrived: deque[JobCommand] = deque()
        # All that are not answered, by id, for the reader.
        self.waiting: dict[str, JobCommand] = {}
        # Why nothing can be carried out any more, once that is so.
        self.closed_because: str | None = None

    def deliver(self, sent: envelope.Command, parameters: Parameters | None, entry: bytes) -> None:
        """A command to carry out, from the reader."""
        command = JobCommand(sent, parameters, entry, self._conclude)
        self.waiting[command.id] = command
        if self._hands.capabilities.get(command.action) == UNSUPPORTED:
            command.unsupported(self._hands.cannot(command.action) or "")
        elif self.closed_because is not None:
            command.failed(self.closed_because)
        else:
            self.arrived.append(command)
            self._tell()

    def due(self, now: datetime, too_late: str = TOO_LATE) -> list[JobCommand]:
        """The commands whose turn it is, taken off the desk; those that need no loop are answered."""
        found: list[JobCommand] = []
        held_back: list[JobCommand] = []
        for _ in range(len(self.arrived)):
            command = self.arrived.popleft()
            if now >= command.expires_at:
                self.expire(command, too_late)
            elif command.undo_of in self.waiting and command.undo_of != command.id:
                held_back.append(command)  # until it is known whether there is something to undo
            elif command.undo_of is not None and not self._was_applied(command.undo_of):
                command.applied(NOTHING_TO_UNDO)
            else:
                found.append(command)
        self.arrived.extendleft(reversed(held_back))
        return found

    def expire(self, command: JobCommand, reason: str) -> None:
        """It waited too long for the loop. Never applied, so the same command may come again."""
        command.status = envelope.EXPIRED
        self._memory.forget(command.id)
        self.waiting.pop(command.id, None)
        known = self.answers.known(envelope.EXPIRED, {"reason": reason})
        self.answers.give(command.id, known, command.entry, forget=True)

    def close(self, command: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        """The command has been answered, for all ranks alike."""
        known = self.answers.known(status, fitting(output))
        self._memory.note(command.id, known)
        self.waiting.pop(command.id, None)
        self.answers.give(command.id, known, command.entry, remember=True)

    def close_ranks(self, command: JobCommand, told: Iterable[int]) -> None:
        """Every rank has answered it, see `JobCommand.outcomes`; `told` are those that the server knows of."""
        outcomes = dict(command.outcomes)
        applied = [outcome for outcome in outcomes.values() if outcome[0] == envelope.APPLIED]
        status, output = applied[0] if applied else outcomes[min(outcomes)]
        known = Known(self._memory.owner, status, output, outcomes)
        self._memory.note(command.id, known)
        self.waiting.pop(command.id, None)
        self.answers.conclude(command.id, known, command.entry, outcomes.keys() - set(told))

    def _was_applied(self, command_id: str) -> bool:
        known = self._memory.here(command_id)
        return known is not None and known.status == envelope.APPLIED


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


def told(error: BaseException) -> str:
    """What an exception says, if it does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def fitting(output: Mapping[str, Any]) -> Mapping[str, Any]:
    """`output`, or a note in its place where it is too large to be kept."""
    size = len(json.dumps(output))
    return output if size <= _LARGEST_OUTPUT else too_large(size)
