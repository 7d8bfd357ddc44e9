"""What the agent hands to the code that acts on the node, and how that code answers.

An `Executor` carries out one action. The one thread of its worker queue calls it, so two commands of one queue never
overlap. By then the command has been verified, the policy allows it, and the journal has it. What the executor
returns is the reply's output (``applied``); what it raises is the reply's status and reason.

A command can come to its executor again, ``resumed``, when the agent ended in the middle of it. So an executor works
towards a state that the command and its own records name, never from the state that it finds: it sets an absolute
value, or deletes what a rule names.

Not here: where commands come from (``command_runner``), or when they are carried out (``worker_queues``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from trainmedic.wire.envelope import Command


def _never() -> bool:
    return False


class AcceptedCommand(Struct, frozen=True):
    """A command that the agent has written down and will answer.

    ``resumed``: an earlier process of this agent may have begun it under the same id.
    ``is_stopping`` returns true once the agent is stopping. An executor that takes longer than a moment asks
    it between its pieces of work, and raises `CommandInterrupted`; the command is then resumed at the next start.
    ``is_withdrawn`` returns true once the server has withdrawn the command (see `SupportsWithdrawal`).
    """

    command: Command
    resumed: bool = False
    is_stopping: Callable[[], bool] = _never
    is_withdrawn: Callable[[], bool] = _never

    @property
    def is_over(self) -> bool:
        """True once the command is withdrawn or the agent is stopping."""
        return self.is_withdrawn() or self.is_stopping()


class Executor(Protocol):
    """Carries out one action."""

    @property
    def action(self) -> str:
        """The action's name, such as ``gpu.power_limit``."""
        ...

    @property
    def queue(self) -> str:
        """The worker queue whose thread calls it: ``gpu``, ``disk``, ``facts`` or ``logs``, so that a long cleanup
        never holds up a power cap."""
        ...

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        """Carry the command out; return the output, plain values that JSON can carry.

        A command with ``undo_of`` takes an earlier one back. It comes here only where the earlier one may have had an
        effect, because it was applied or failed, or the executor remembers it (`RemembersEffects`); otherwise the
        agent answers by itself.

        Raises CommandRejected (it makes no sense or is not allowed here), CommandUnsupported (this node cannot do it),
        CommandFailed (tried, not done; another attempt may succeed), CommandInterrupted (see `AcceptedCommand`).
        Any other exception is logged, and answered as failed.
        """
        ...


class PeriodicTask(Protocol):
    """Work of the agent's own that comes due by itself, such as ending a power cap whose lease is over.

    It runs in the thread of a worker queue, between the queue's commands, so it never meets one of them halfway.
    """

    @property
    def queue(self) -> str: ...

    def due(self) -> float | None:
        """Return the seconds until it wants to run: 0 or less for now, None while nothing will come due.

        The worker queue asks before each wait, so after every command.
        """
        ...

    def run(self) -> None:
        """Do what is due. An exception that leaves it is logged, and it is run again a second later."""
        ...


@runtime_checkable
class RemembersEffects(Protocol):
    """An executor with a record of its own of what commands have brought about."""

    def remembers(self, command_id: str) -> bool:
        """Whether it knows what has become of that command's effect, so that its undo needs no other memory."""
        ...


@runtime_checkable
class SupportsWithdrawal(Protocol):
    """An executor that only reads, so that its command can end at any time without an effect.

    It asks `AcceptedCommand.is_withdrawn` between its pieces of work, and raises `CommandWithdrawn`.
    """

    @property
    def withdrawal(self) -> str:
        """Action of the message that withdraws a command of this executor, such as ``logs.withdraw``."""
        ...


@runtime_checkable
class SupportsAbandon(Protocol):
    """An executor that can take back what is half-done."""

    def abandon(self, accepted: AcceptedCommand) -> None:
        """Undo all effects of this command: an earlier process may have begun it, and it has expired since.

        Called instead of `Executor.perform`, before the command is answered ``expired``. The same command may come
        again later, with more time.
        """
        ...
