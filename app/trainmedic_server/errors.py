"""Errors that the server raises on purpose.

Adapters translate and chain library errors where they occur.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmedic.errors import ConfigurationError as ConfigurationError
from trainmedic.errors import TrainmedicError as TrainmedicError


class DemoFailed(TrainmedicError):
    """A program of the demo did not start, or ended."""


class PlaybookError(TrainmedicError):
    """A playbook cannot be loaded. The text has file, line and column."""


class PayloadError(TrainmedicError):
    """A request's body or parameters are invalid.

    ``field`` is the path of the first invalid member, such as ``alerts.0.startsAt``. ``problems`` lists all, as (field,
    message).
    """

    def __init__(self, message: str, field: str | None = None, problems: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.field = field
        self.problems = tuple(problems)

    @classmethod
    def at(cls, problems: Sequence[tuple[str, str]]) -> PayloadError:
        message = "; ".join(f"{field}: {reason}" if field else reason for field, reason in problems)
        return cls(message, problems[0][0], problems)


class NotFound(TrainmedicError):
    """No object has this name."""


class Conflict(TrainmedicError):
    """The request does not fit the current state, such as approving a closed run."""


class NotEntitled(TrainmedicError):
    """The caller may not perform this operation."""


class Saturated(TrainmedicError):
    """A bounded queue is full; ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoreUnavailable(TrainmedicError):
    """The run store is unreachable or not writable."""


class StoreExplained(StoreUnavailable):
    """The run store fails for a known reason. ``reason`` completes "The run store cannot be used: …", without path or
    URL.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreSlow(StoreUnavailable):
    """A read of the run store timed out. The store itself responds."""


class ArchiveUnavailable(TrainmedicError):
    """The archive of old runs cannot be read or written. Nothing is deleted."""


class BusUnavailable(TrainmedicError):
    """Redis is unreachable."""


class BusExplained(BusUnavailable):
    """Redis is unusable for a reason that the text states without a URL."""


class BusFull(BusExplained):
    """Redis accepts no more clients. The text states a remedy."""


class MetricsUnavailable(TrainmedicError):
    """Prometheus is unreachable or does not answer the query."""


class MetricsRefused(MetricsUnavailable):
    """Prometheus rejects the query as invalid; retrying cannot help."""


class LogsUnavailable(TrainmedicError):
    """No log source is available."""


class LogQueryRefused(TrainmedicError):
    """The log source rejects the query."""


class ActionFailure(TrainmedicError):
    """A step attempt failed.

    ``output`` is what the attempt reported. ``is_begun`` is True if a part was applied, which the undo must revert.
    """

    is_begun = False

    def __init__(self, message: str, output: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.output: Mapping[str, Any] = output or {}

    def add(self, detail: str, output: Mapping[str, Any]) -> None:
        self.args = (f"{self}; {detail}",)
        self.output = {**self.output, **output}


class TemporaryFailure(ActionFailure):
    """Another attempt may succeed."""


class PermanentFailure(ActionFailure):
    """Another attempt would fail in the same way."""


class NotSetUp(ActionFailure):
    """The server is not set up for the step, which is skipped."""


class NoLongerWanted(ActionFailure):
    """The attempt ended early, because the run's alert resolved."""


class EffectDisproved(ActionFailure):
    """The change was applied without the requested effect. A retry would apply it twice."""

    is_begun = True


class OutcomeUnknown(ActionFailure):
    """The effect may or may not have happened."""


class ClusterUnavailable(TemporaryFailure):
    """The API of Kubernetes or Slurm is unreachable, overloaded or failing.

    ``retry_after`` is in seconds, None if the API gave none. ``may_be_done`` is True if the request may have changed
    something.
    """

    def __init__(self, message: str, retry_after: float | None = None, may_be_done: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.may_be_done = may_be_done


class ObjectChanged(TemporaryFailure):
    """A Kubernetes object changed after it was read."""


class EvictionBlocked(TemporaryFailure):
    """A PodDisruptionBudget blocks the eviction."""


class ObjectMissing(PermanentFailure):
    """An object of Kubernetes or Slurm does not exist."""


class ObjectExists(PermanentFailure):
    """A Kubernetes object of that name exists."""


class ChannelMissing(PermanentFailure):
    """The notification channel is not configured."""


class ChatRefused(PermanentFailure):
    """Slack rejects the call. ``code`` is its error code, such as ``message_not_found``."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ClusterRefused(PermanentFailure):
    """The API of Kubernetes or Slurm denies the request or finds it invalid.

    ``may_pass`` is True if permission is missing: a starting API server denies all requests until it has read its
    roles.
    """

    def __init__(self, message: str, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass
