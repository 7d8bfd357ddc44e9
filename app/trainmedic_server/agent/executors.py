"""What the agent hands to the part of it that acts, and how that part answers.

A `Executor` carries out one action. It is called in the one thread of its lane, so two orders of a lane never
overlap. By then the order has been verified, is allowed by the policy and stands in the journal. What the
hand returns is the reply's output (``applied``); what it raises is the reply's status and reason.

An order can come to its hand again, ``resumed``, when the agent ended in the middle of it. So a hand works
towards a state that the order and its own records name, never from the state that it finds: setting to an
absolute value, deleting what a rule names.

Not here: where orders come from (``intake``), or when they are carried out (``lanes``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from trainmedic.wire.envelope import Command

NOTHING_TO_UNDO: Mapping[str, Any] = {"nothing_to_undo": True}
"""The output of an undo of what was never applied here."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class AcceptedCommand:
    """One command as a hand sees it.

    ``resumed``: an earlier process of this agent may have begun it under the same id. ``is_stopping``
    becomes true when the agent has been told to end: a hand that takes longer than a moment asks it between
    its pieces of work, and raises `CommandInterrupted`; the order is then resumed at the next start.
    """

    command: Command
    resumed: bool = False
    is_stopping: Callable[[], bool] = _never


class Executor(Protocol):
    """Carries out one action."""

    @property
    def action(self) -> str:
        """Its name, ``gpu.power_limit``."""
        ...

    @property
    def queue(self) -> str:
        """Which thread calls it: ``gpu``, ``disk`` or ``facts``, so that a long cleanup never holds up a cap."""
        ...

    def perform(self, order: AcceptedCommand) -> Mapping[str, Any]:
        """Do it; return the output, plain values that JSON can carry.

        An order with ``command.undo_of`` takes an earlier one back. It comes here only where that one may
        have had an effect: it was applied, or it failed; where there is nothing to take back, the output is
        `NOTHING_TO_UNDO`.

        Raises CommandRejected (it makes no sense or is not allowed here), CommandUnsupported (this node cannot do it),
        CommandFailed (tried, not done; another attempt may succeed), CommandInterrupted (see `AcceptedCommand`).
        Anything else that leaves it is logged, and answered as failed.
        """
        ...


class PeriodicTask(Protocol):
    """Work of the agent's own that comes due by itself, such as ending a power cap whose lease is over.

    It runs in a lane, between the lane's orders, so it never meets one of them halfway.
    """

    @property
    def queue(self) -> str: ...

    def due(self) -> float | None:
        """Seconds until it wants to run, 0 or less for now; None while nothing will come due.

        Asked before each wait of the lane, so after every order.
        """
        ...

    def run(self) -> None:
        """Do what is due. What leaves it is logged, and it is run again a second later."""
        ...


@runtime_checkable
class SupportsAbandon(Protocol):
    """A hand that can take back what is half-done."""

    def abandon(self, order: AcceptedCommand) -> None:
        """An earlier process may have begun this order, and it has expired since: leave nothing of it in force.

        Called instead of `Executor.perform`, before the order is answered ``expired``. The same command may
        come again later, with more time.
        """
        ...
