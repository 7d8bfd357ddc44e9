"""Interface between the agent and the code that acts on the node.

One thread per worker queue calls executors, so commands of one queue never overlap. Commands are already verified,
allowed and journaled. The return value becomes the output of an ``applied`` reply; an exception gives status and
reason.

A command may be executed again (``resumed``) after the agent stopped. So an executor works towards a state that the
command and its own records define, not relative to the state it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from trainmedic.wire.envelope import Command


def _never() -> bool:
    return False


class AcceptedCommand(Struct, frozen=True):
    """A journaled command, which the agent will answer.

    - ``resumed``: an earlier process may have begun it under the same ID.
    - ``is_stopping``: true once the agent is stopping. A long-running executor then raises `CommandInterrupted`.
    - ``is_withdrawn``: true once the server has withdrawn the command (`SupportsWithdrawal`).
    """

    command: Command
    resumed: bool = False
    is_stopping: Callable[[], bool] = _never
    is_withdrawn: Callable[[], bool] = _never

    @property
    def is_over(self) -> bool:
        return self.is_withdrawn() or self.is_stopping()


class Executor(Protocol):
    @property
    def action(self) -> str: ...

    @property
    def queue(self) -> str:
        """Worker queue that calls it: ``gpu``, ``disk``, ``facts`` or ``logs``."""
        ...

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        """Execute the command and return its output as JSON-compatible values.

        A command with ``undo_of`` reverts an earlier one that may have had an effect: it was applied, it failed, or the
        executor remembers it (`RemembersEffects`).

        Raises CommandRejected (invalid or not allowed), CommandUnsupported (impossible on this node), CommandFailed (a
        retry may succeed) or CommandInterrupted. Other exceptions are logged and answered as failed.
        """
        ...


class PeriodicTask(Protocol):
    """The agent's own recurring work, such as ending expired power caps.

    It runs in a worker queue's thread, between commands.
    """

    @property
    def queue(self) -> str: ...

    def due(self) -> float | None:
        """Return the seconds until the next run: 0 or less for now, None for never. Asked before each wait of the
        queue.
        """
        ...

    def run(self) -> None:
        """Do what is due. After an exception, which is logged, it runs again a second later."""
        ...


@runtime_checkable
class RemembersEffects(Protocol):
    def remembers(self, command_id: str) -> bool:
        """Return whether it knows the command's effect, so that an undo needs no journal entry."""
        ...


@runtime_checkable
class SupportsWithdrawal(Protocol):
    """A read-only executor, whose command can end at any time.

    It checks `AcceptedCommand.is_withdrawn` between pieces of work and raises `CommandWithdrawn`.
    """

    @property
    def withdrawal(self) -> str:
        """Action of the message that withdraws its commands, such as ``logs.withdraw``."""
        ...


@runtime_checkable
class SupportsAbandon(Protocol):
    def abandon(self, accepted: AcceptedCommand) -> None:
        """Revert all effects of an expired command that an earlier process may have begun, before it is answered
        ``expired``.

        The same command may be sent again with a later deadline.
        """
        ...
