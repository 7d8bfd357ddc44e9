"""Every error that the node agent raises on purpose, and what each one means to its caller.

The tree, below `trainmedic.errors.TrainmedicError`::

    JournalUnavailable          the agent's journal cannot be read or written
    GpuError                    the GPU or its driver does not do what is asked
    ├── GpuAbsent               there is no such GPU on this node
    ├── GpuLost                 the GPU was there and does not answer; it may come back
    ├── DriverAbsent            no driver is loaded, or it is being loaded anew
    ├── NotSupported            this GPU, or this way of dividing it, does not offer that
    ├── NoPermission            the agent's user may not do that
    ├── GpuTaken                another agent of the machine has the GPU
    └── GpuFailure              the driver reports anything else; another attempt may succeed
        └── GpuStuck            a call has not come back; it may still take its effect
    CommandNotExecuted          an executor of the agent raises it to answer its command
    ├── CommandRejected         the command makes no sense here, or the agent's policy does not allow it
    ├── CommandUnsupported      this node cannot carry out such a command
    ├── CommandFailed           the executor tried and did not succeed; another attempt may succeed
    ├── CommandWithdrawn        the server withdrew a command that only reads
    └── CommandInterrupted      the agent ends in the middle of the command, and resumes it at its next start

The SDK's ``Refusal`` is not shared: the authors of training jobs raise it with a reason alone, while an executor's
answer carries ``output`` too, and can be a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from trainmedic.errors import TrainmedicError
from trainmedic.wire import envelope


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


class GpuTaken(GpuError):
    """Another agent of this machine has the GPU."""


class GpuFailure(GpuError):
    """The driver reports anything else; another attempt may succeed."""


class GpuStuck(GpuFailure):
    """A call has not come back; it may still take its effect."""


class CommandNotExecuted(TrainmedicError):
    """An executor of the agent does not carry its command out. The text is the reply's ``reason``; ``output`` is what
    the reply says beside it, and ``status`` the reply's status."""

    status: ClassVar[str] = envelope.FAILED

    def __init__(self, reason: str, output: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.output: Mapping[str, Any] = output or {}


class CommandRejected(CommandNotExecuted):
    """The command makes no sense here, or the agent's policy does not allow it."""

    status = envelope.REJECTED


class CommandUnsupported(CommandNotExecuted):
    """This node cannot carry out such a command."""

    status = envelope.UNSUPPORTED


class CommandFailed(CommandNotExecuted):
    """The executor tried and did not succeed; another attempt may succeed."""


class CommandWithdrawn(CommandNotExecuted):
    """The server withdrew a command that only reads, because its caller has left."""

    status = envelope.EXPIRED


class CommandInterrupted(CommandNotExecuted):
    """The agent ends in the middle of the command. The command gets no reply now, and is resumed at the next start."""
