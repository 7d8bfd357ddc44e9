"""Exceptions shared by the node agent's packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from trainmedic.errors import TrainmedicError
from trainmedic.wire import envelope


class JournalUnavailable(TrainmedicError):
    """A database of the agent or the log reader cannot be read or written."""


class GpuError(TrainmedicError):
    """The GPU or its driver cannot do what was requested."""


class GpuAbsent(GpuError):
    """The node has no such GPU."""


class GpuLost(GpuError):
    """The GPU stopped responding; it may recover."""


class DriverAbsent(GpuError):
    """No driver is loaded, or it is being reloaded."""


class NotSupported(GpuError):
    """The GPU's model or MIG mode does not support the operation."""


class NoPermission(GpuError):
    """The driver refuses the operation to the agent's user."""


class GpuTaken(GpuError):
    """Another agent of this machine controls the GPU."""


class GpuFailure(GpuError):
    """Any other driver error; a retry may succeed."""


class GpuStuck(GpuFailure):
    """A driver call has not returned; it may still take effect."""


class CommandNotExecuted(TrainmedicError):
    """An executor did not execute its command.

    The reply has the class's ``status``, the message as ``reason``, and `output`'s fields.
    """

    status: ClassVar[str] = envelope.FAILED

    def __init__(self, reason: str, output: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.output: Mapping[str, Any] = output or {}


class CommandRejected(CommandNotExecuted):
    """The command is invalid here, or the policy forbids it."""

    status = envelope.REJECTED


class CommandUnsupported(CommandNotExecuted):
    """This node cannot execute such a command."""

    status = envelope.UNSUPPORTED


class CommandFailed(CommandNotExecuted):
    """The executor tried and failed; another attempt may succeed."""


class CommandWithdrawn(CommandNotExecuted):
    """The server withdrew a read-only command whose caller has left."""

    status = envelope.EXPIRED


class CommandInterrupted(CommandNotExecuted):
    """The agent stops during the command, and resumes it at its next start without a reply now."""
