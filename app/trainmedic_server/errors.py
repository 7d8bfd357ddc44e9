"""Every error that the server raises on purpose, and what each one means to its caller.

Not here: the errors of what server and agent share (``core_errors``), of logs and dumps (``log_errors``), and of the
node agent (``agent_errors``).

The tree::

    TrainmedicError                 of the SDK (``trainmedic.errors``), whose errors stand below it as well
    ├── ConfigurationError          of the SDK; a setting, file or flag is wrong, and the process cannot start with it
    ├── PlaybookError               a playbook cannot be loaded; the text says file, line and column
    ├── PayloadError                a webhook body is not what Alertmanager sends; ``field`` says where
    ├── NotFound                    no run, playbook or other named object has that name
    ├── Conflict                    the request does not fit the state, such as approving a closed run
    ├── NotEntitled                who asks may not do that, such as approving what only others may approve
    ├── Saturated                   a bounded queue is full; the same request may succeed later
    ├── StoreUnavailable            the run store cannot be reached or written
    │   └── StoreSlow               one read took too long
    ├── ArchiveUnavailable          the archive of old runs cannot be written or read, or is away
    ├── BusUnavailable              Redis cannot be reached
    │   └── BusFull                 Redis has no room for another client; the text says so
    ├── MetricsUnavailable          Prometheus cannot be reached, or does not answer the question
    │   └── MetricsRefused          Prometheus takes the question for wrong, and would the next time
    ├── LogsUnavailable             nobody who keeps the lines of logs can be asked
    ├── LogQueryRefused             what is asked of logs makes no sense to who keeps them
    └── ActionFailure               an attempt of a step did not succeed
        ├── TemporaryFailure        another attempt may succeed
        │   ├── ClusterUnavailable  the Kubernetes API is away, overloaded or failing
        │   ├── ObjectChanged       a Kubernetes object is not what it was when it was read
        │   └── EvictionBlocked     a PodDisruptionBudget does not let a pod go now
        ├── PermanentFailure        another attempt would fail alike (rejected, unsupported, bad parameters)
        │   ├── ObjectMissing       a Kubernetes object does not exist
        │   ├── ObjectExists        a Kubernetes object of that name exists already
        │   ├── ChannelMissing      there is no notification channel, or none of that name
        │   ├── ChatRefused         Slack takes a call for wrong; ``code`` is its word for why
        │   └── ClusterRefused      the Kubernetes API refuses: no permission, or no valid request
        ├── NotSetUp                this server lacks what a step needs that is no part of a repair; it is skipped
        ├── NoLongerWanted          it was ended early, because the run's alert has resolved
        ├── EffectDisproved         it was carried out, and what came of it is not what was asked for
        └── OutcomeUnknown          the effect may or may not have happened: no reply in time, or a kill in between

The base and `ConfigurationError` are the SDK's own classes, because server and agent load the SDK's wire format and
its settings: one ``except`` catches what either of them raises.

Adapters translate the errors of libraries once, where they meet them, and chain them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmedic.errors import ConfigurationError as ConfigurationError
from trainmedic.errors import TrainmedicError as TrainmedicError


class PlaybookError(TrainmedicError):
    """A playbook cannot be loaded."""


class PayloadError(TrainmedicError):
    """A webhook body is not what Alertmanager sends.

    ``field`` is the path of the offending member, such as ``alerts.0.startsAt``; ``problems`` lists
    every member that is wrong, each as (field, message).
    """

    def __init__(self, message: str, field: str | None = None, problems: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.field = field
        self.problems = tuple(problems)

    @classmethod
    def at(cls, problems: Sequence[tuple[str, str]]) -> PayloadError:
        """Make one error of all `problems`; its ``field`` is that of the first."""
        message = "; ".join(f"{field}: {reason}" if field else reason for field, reason in problems)
        return cls(message, problems[0][0], problems)


class NotFound(TrainmedicError):
    """No run, playbook or other named object has that name."""


class Conflict(TrainmedicError):
    """The request does not fit the present state."""


class NotEntitled(TrainmedicError):
    """Who asks may not do that."""


class Saturated(TrainmedicError):
    """A bounded queue is full; ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoreUnavailable(TrainmedicError):
    """The run store cannot be reached or written."""


class StoreSlow(StoreUnavailable):
    """A read of the run store exceeded its time limit and was cancelled. The store itself responds."""


class ArchiveUnavailable(TrainmedicError):
    """The archive of old runs cannot be written or read, or is away. Nothing is deleted then."""


class BusUnavailable(TrainmedicError):
    """Redis cannot be reached."""


class BusExplained(BusUnavailable):
    """Redis cannot be used, for a reason that the text states. The text is our own and shows nothing of a URL."""


class BusFull(BusExplained):
    """Redis has no room for another client. The text, which is ours, says so, and what to do."""


class MetricsUnavailable(TrainmedicError):
    """Prometheus cannot be reached, or does not answer the question."""


class MetricsRefused(MetricsUnavailable):
    """Prometheus takes the question for wrong, and would the next time."""


class LogsUnavailable(TrainmedicError):
    """Nobody who keeps the lines of logs can be asked, now or at all."""


class LogQueryRefused(TrainmedicError):
    """What is asked of logs makes no sense to who keeps them."""


class ActionFailure(TrainmedicError):
    """An attempt of a step did not succeed.

    ``output`` is what the attempt reported. ``is_begun`` says that a part of the step was applied all the same, which
    the step's undo has to take back.
    """

    is_begun = False

    def __init__(self, message: str, output: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.output: Mapping[str, Any] = output or {}


class TemporaryFailure(ActionFailure):
    """Another attempt may succeed."""


class PermanentFailure(ActionFailure):
    """Another attempt would fail alike."""


class NotSetUp(ActionFailure):
    """The server is not set up for the step, such as one that notifies people. Nothing was done. The step is skipped,
    and the run continues."""


class NoLongerWanted(ActionFailure):
    """The attempt ended early because the run's alert has resolved (``Call.clearance`` answered ``resolved``)."""


class EffectDisproved(ActionFailure):
    """It was carried out, and what came of it is not what was asked for. Another attempt would carry it out once more,
    so there is none."""

    is_begun = True


class OutcomeUnknown(ActionFailure):
    """The effect may or may not have happened."""


class ClusterUnavailable(TemporaryFailure):
    """The Kubernetes API is away, overloaded or failing.

    ``retry_after`` is the seconds that the API asked for, None where it asked for none. ``may_be_done`` says that the
    request was a change, which the API may have made nevertheless.
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
    """A Kubernetes object of that name exists already."""


class ChannelMissing(PermanentFailure):
    """No notification channel is set, or none of the requested name."""


class ChatRefused(PermanentFailure):
    """Slack takes a call for wrong; ``code`` is its word for why, such as ``message_not_found``."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ClusterRefused(PermanentFailure):
    """The Kubernetes API refuses: no permission, or no valid request.

    ``may_pass`` says that the API does not let our account: an API server that has just started refuses everybody
    until it has read its roles, so the same request may succeed a moment later.
    """

    def __init__(self, message: str, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass
