"""Interface between the agent and the code that acts on the node.

A command may be executed again (``resumed``) after the agent stopped. So an executor works towards a state that the
command and its own records define, not relative to the state it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from trainmedic.wire.envelope import Command
from trainmedic_agent.errors import CommandRejected

_REPLY_MARGIN = timedelta(seconds=5)  # for the reply; less for short commands


def _never() -> bool:
    return False


class AcceptedCommand(Struct, frozen=True):
    """A command to execute, journaled unless its executor `OnlyReads`."""

    command: Command
    resumed: bool = False  # an earlier process may have begun it
    is_stopping: Callable[[], bool] = _never  # a long-running executor then raises `CommandInterrupted`
    is_withdrawn: Callable[[], bool] = _never  # see `SupportsWithdrawal`

    @property
    def deadline(self) -> datetime:
        """End of the execution, early enough for the reply."""
        lifetime = self.command.expires_at - self.command.issued_at
        return self.command.expires_at - min(_REPLY_MARGIN, lifetime / 10)

    @property
    def is_over(self) -> bool:
        """True if the executor must stop, because the command was withdrawn or the agent stops."""
        return self.is_withdrawn() or self.is_stopping()


def refuse_unknown_parameters(command: Command, known: Sequence[str]) -> None:
    """Raises CommandRejected."""
    if unknown := [name for name in command.params if name not in known]:
        raise CommandRejected(f"{command.action} does not know {listed(unknown)}; it takes {listed(known)}")


def listed(names: Sequence[object]) -> str:
    return ", ".join(repr(name)[:130] for name in names[:20])


class Executor(Protocol):
    @property
    def action(self) -> str: ...

    @property
    def queue(self) -> str:
        """Name of the worker queue, whose thread runs the command; see `service.QUEUES`."""
        ...

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        """Return the output as JSON-compatible values.

        A command with ``undo_of`` reverts an earlier one that may have had an effect.

        Raises CommandNotExecuted, of which CommandInterrupted is not answered. Other exceptions are answered as failed.
        """
        ...


class PeriodicTask(Protocol):
    @property
    def queue(self) -> str: ...

    def due(self) -> float | None:
        """Return the seconds until the next run, None for never."""
        ...

    def run(self) -> None:
        """Do what is due. After an exception, it runs again within a second."""
        ...


@runtime_checkable
class RemembersEffects(Protocol):
    def remembers(self, command_id: str) -> bool:
        """Return whether the executor knows the effect, so that an undo needs no journal entry."""
        ...


@runtime_checkable
class OnlyReads(Protocol):
    """An executor whose commands are not journaled: they may be executed twice, and are lost if the agent stops.

    For readings every few seconds, which would displace older changes from the journal.
    """

    is_only_reading: bool


@runtime_checkable
class SupportsWithdrawal(Protocol):
    """A read-only executor that checks `AcceptedCommand.is_withdrawn` between pieces of work and raises
    `CommandWithdrawn`.
    """

    @property
    def withdrawal(self) -> str:
        """Action that withdraws a command, such as ``logs.withdraw``."""
        ...


@runtime_checkable
class SupportsAbandon(Protocol):
    def abandon(self, accepted: AcceptedCommand) -> None:
        """Revert what an earlier process may have begun of a command that is now expired, and may be sent again, or
        refused.
        """
        ...
