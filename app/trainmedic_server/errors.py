"""Every error that Trainmedic raises on purpose.

The tree::

    TrainmedicError
    ├── ConfigurationError      a setting, file or flag is wrong; the process cannot start with it
    ├── PlaybookError           a playbook cannot be loaded; says file, line and column
    ├── ExpressionError         a template or expression failed while a run used it
    ├── PayloadError            a webhook body is not what Alertmanager sends; says the field
    ├── NotFound                no run, playbook or other named thing of that name
    ├── Conflict                the request does not fit the state: approving a closed run
    ├── Saturated               a bounded queue is full; the same request may succeed later
    ├── StoreUnavailable        the run store cannot be reached or written
    ├── BusUnavailable          Redis cannot be reached
    ├── JournalUnavailable      the agent's journal cannot be read or written
    ├── GpuError                the GPU or its driver does not do what is asked
    │   ├── GpuAbsent           there is no such GPU on this node
    │   ├── GpuLost             the GPU was there and does not answer; it may come back
    │   ├── DriverAbsent        no driver is loaded, or it is being loaded anew
    │   ├── NotSupported        this GPU, or this way of dividing it, does not offer that
    │   ├── NoPermission        the agent's user may not do that
    │   └── GpuFailure          anything else that the driver reports; another attempt may succeed
    │       └── GpuStuck        a call has not come back; it may still take its effect
    ├── CommandNotExecuted           raised by a hand of the agent, to answer its order
    │   ├── CommandRejected            the order makes no sense here, or the agent's policy does not allow it
    │   ├── CommandUnsupported         this node cannot carry out such an order
    │   ├── CommandFailed              it was tried and is not done; another attempt may succeed
    │   └── CommandInterrupted         the agent ends in the middle of it; resumed at the next start
    └── ActionFailure           an attempt of a step did not succeed
        ├── TemporaryFailure    another attempt may succeed
        │   ├── ClusterUnavailable  the Kubernetes API is away, overloaded or failing
        │   ├── ObjectChanged       a Kubernetes object is not what it was when it was read
        │   └── EvictionBlocked     a PodDisruptionBudget does not let a pod go now
        ├── PermanentFailure    another attempt would fail alike (rejected, unsupported, bad parameters)
        │   ├── ObjectMissing       a Kubernetes object does not exist
        │   ├── ObjectExists        there is one of that name already
        │   └── ClusterRefused      the Kubernetes API refuses: no permission, or no valid request
        └── OutcomeUnknown      it may or may not have happened (no reply in time, killed in between)

Errors of libraries are translated once, in the adapter that met them, and chained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TrainmedicError(Exception):
    """Base of the tree; its text is meant for a person."""


class ConfigurationError(TrainmedicError):
    """A setting, file or flag is wrong."""


class PlaybookError(TrainmedicError):
    """A playbook cannot be loaded."""


class ExpressionError(TrainmedicError):
    """A template or expression failed while a run used it."""


class PayloadError(TrainmedicError):
    """A webhook body is not what Alertmanager sends.

    ``field`` is the path of the offending member, such as ``alerts.0.startsAt``; ``problems`` are
    all that were found, each as (field, message).
    """

    def __init__(self, message: str, field: str | None = None, problems: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.field = field
        self.problems = tuple(problems)

    @classmethod
    def at(cls, problems: Sequence[tuple[str, str]]) -> PayloadError:
        """The error of one or more problems, the first of which it names."""
        message = "; ".join(f"{field}: {what}" if field else what for field, what in problems)
        return cls(message, problems[0][0], problems)


class NotFound(TrainmedicError):
    """There is nothing of that name."""


class Conflict(TrainmedicError):
    """The request does not fit the present state."""


class Saturated(TrainmedicError):
    """A bounded queue is full; ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoreUnavailable(TrainmedicError):
    """The run store cannot be reached or written."""


class BusUnavailable(TrainmedicError):
    """Redis cannot be reached."""


class JournalUnavailable(TrainmedicError):
    """The agent's journal cannot be read or written."""


class GpuError(TrainmedicError):
    """The GPU or its driver does not do what is asked."""


class GpuAbsent(GpuError):
    """There is no such GPU on this node."""


class GpuLost(GpuError):
    """The GPU was there and does not answer; it may come back."""


class DriverAbsent(GpuError):
    """No driver is loaded, or it is being loaded anew."""


class NotSupported(GpuError):
    """This GPU, or this way of dividing it, does not offer that."""


class NoPermission(GpuError):
    """The agent's user may not do that."""


class GpuFailure(GpuError):
    """Anything else that the driver reports."""


class GpuStuck(GpuFailure):
    """A call has not come back; it may still take its effect."""


class CommandNotExecuted(TrainmedicError):
    """Raised by a hand of the agent that does not carry its order out. The text is the reply's reason, and
    ``output`` what else is known."""

    def __init__(self, reason: str, output: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.output: Mapping[str, Any] = output or {}


class CommandRejected(CommandNotExecuted):
    """The order makes no sense here, or the agent's policy does not allow it."""


class CommandUnsupported(CommandNotExecuted):
    """This node cannot carry out such an order."""


class CommandFailed(CommandNotExecuted):
    """It was tried and is not done; another attempt may succeed."""


class CommandInterrupted(CommandNotExecuted):
    """The agent ends in the middle of the order. It is not answered, and resumed at the next start."""


class ActionFailure(TrainmedicError):
    """An attempt of a step did not succeed. ``output`` is what is known of it; ``is_begun`` that a part of it was
    applied all the same, which the step's undo has to take back."""

    is_begun = False

    def __init__(self, message: str, output: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.output: Mapping[str, Any] = output or {}


class TemporaryFailure(ActionFailure):
    """Another attempt may succeed."""


class PermanentFailure(ActionFailure):
    """Another attempt would fail alike."""


class OutcomeUnknown(ActionFailure):
    """The effect may or may not have happened."""


class ClusterUnavailable(TemporaryFailure):
    """The Kubernetes API is away, overloaded or failing.

    ``retry_after`` is in seconds, where it said so; ``may_be_done`` where what was asked for was a
    change that may have been made nevertheless.
    """

    def __init__(self, message: str, retry_after: float | None = None, may_be_done: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.may_be_done = may_be_done


class ObjectChanged(TemporaryFailure):
    """A Kubernetes object is not what it was when it was read."""


class EvictionBlocked(TemporaryFailure):
    """A PodDisruptionBudget does not let a pod go now."""


class ObjectMissing(PermanentFailure):
    """A Kubernetes object does not exist."""


class ObjectExists(PermanentFailure):
    """There is a Kubernetes object of that name already."""


class ClusterRefused(PermanentFailure):
    """The Kubernetes API refuses: no permission, or no valid request.

    ``may_pass`` where it does not let our account: a server that has just started says so to everybody,
    until it has read its roles.
    """

    def __init__(self, message: str, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass
