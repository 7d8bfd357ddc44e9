"""The format of playbook tests: the models that validate a test file, and its reader.

A test is a timeline: alerts, operators' orders and the replies of actions, and what is expected of
the engine at certain times. Times are durations since the test's start.

Not here: running tests (``suite``) and comparing (``expectations``). Who calls it: ``suite`` and ``check``.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from trainmedic_core import duration, model_errors
from trainmedic_core.fields import Duration
from trainmedic_core.problems import FileProblem
from trainmedic_logs.simulation import log_test_format
from trainmedic_logs.simulation.log_test_format import LogCheck, LogSuite, LogSuiteEntry, LogTest, as_list
from trainmedic_server.domain.alert import AlertStatus
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Decision, Status, StepStatus, UndoStatus


def _read_offset(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str) and value.startswith("-"):
        return -duration.parse(value[1:])
    if isinstance(value, str):
        return duration.parse(value)
    raise ValueError(f"{value!r} is not a time; write it with its unit, as 90s or -20m")


Offset = Annotated[
    timedelta, BeforeValidator(_read_offset), WithJsonSchema({"type": "string", "examples": ["-20m", "90s"]})
]
"""A time on the test's clock; before its start where it is negative."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class AlertContent(_Model):
    """An alert's labels (``alertname`` among them) and annotations. Its labels are its identity."""

    labels: dict[str, str]
    annotations: dict[str, str] = {}


class AlertEntry(_Model):
    """One delivery to the webhook. Without ``starts_at`` the alert began when the test first reported it as firing."""

    at: Duration = timedelta(0)
    alert: AlertContent
    status: AlertStatus = AlertStatus.FIRING
    starts_at: Offset | None = None


class SimulatedOperation(StrEnum):
    """What an operator can do in a test."""

    APPROVE = "approve"
    REJECT = "reject"
    CANCEL = "cancel"
    UNDO = "undo"
    CLOSE_UNDO = "close_undo"
    PAUSE = "pause"
    RESUME = "resume"
    CLOSE_BREAKER = "close_breaker"
    RESTART = "restart"


class OrderEntry(_Model):
    """An operator's order, which goes to the newest run (of `playbook` and `target`, where they are set).

    ``restart`` kills the server where it stands and starts another one `down` later.
    """

    at: Duration = timedelta(0)
    do: SimulatedOperation
    playbook: str | None = None
    target: str | None = None
    by: str = "operator"
    groups: tuple[str, ...] = ()
    note: str = ""
    refused: bool = False
    down: Duration = timedelta(0)


class ReplyOutcome(StrEnum):
    """Outcome of an attempt of an action. The values are those of replies, ``timeout`` if none comes, and ``skipped``
    if the server is not set up for the action."""

    APPLIED = "applied"
    FAILED = "failed"
    REJECTED = "rejected"
    UNSUPPORTED = "unsupported"
    SKIPPED = "skipped"
    TIMEOUT = "timeout"


def _long_form(value: Any) -> Any:
    """The full mapping for the short forms ``applied`` and ``{failed: reason}``."""
    if isinstance(value, str):
        return {"outcome": value}
    if isinstance(value, dict) and "outcome" not in value:
        named = [name for name in ReplyOutcome if name in value]
        if len(named) == 1:
            detail = value[named[0]]
            rest = {key: member for key, member in value.items() if key != named[0]}
            key = "output" if named[0] is ReplyOutcome.APPLIED else "reason"
            return {"outcome": named[0].value, **rest, **({} if detail is None else {key: detail})}
    return value


class ReplyModel(_Model):
    outcome: ReplyOutcome
    output: dict[str, Any] = {}
    reason: str = ""
    after: Duration = timedelta(0)


Reply = Annotated[ReplyModel, BeforeValidator(_long_form)]


class UndoExpected(_Model):
    """What is expected of a step's undo. `params` may name some of the parameters only."""

    status: UndoStatus | None = None
    action: str | None = None
    params: dict[str, Any] | None = None


class StepExpected(_Model):
    """What is expected of a step. A mapping may name some of the members only, a text may be a part of the text."""

    status: StepStatus | None = None
    params: dict[str, Any] | None = None
    output: dict[str, Any] | None = None
    attempts: int | None = None
    error: str | None = None
    message: str | None = None
    undo: Annotated[UndoExpected, BeforeValidator(lambda value: _status_alone(value))] | None = None


def _status_alone(value: Any) -> Any:
    return {"status": value} if isinstance(value, str) else value


class RunExpected(_Model):
    """What is expected of one item of the history."""

    playbook: str | None = None
    target: str | None = None
    decision: Decision | None = None
    status: Status | None = None
    mode: Mode | None = None
    message: str | None = None
    alerts: int | None = Field(None, description="How many alerts the run has, those that joined included.")
    steps: dict[str, Annotated[StepExpected, BeforeValidator(_status_alone)]] = {}
    events: tuple[str, ...] | None = Field(None, description="Kinds of events, in this order; others may be between.")


class CallExpected(_Model):
    """An action that is expected to be carried out."""

    action: str
    params: dict[str, Any] | None = None
    undo: bool | None = None


class DecisionExpected(_Model):
    """What one playbook is expected to decide on one delivered alert."""

    playbook: str | None = None
    target: str | None = None
    decision: Decision


class Check(LogCheck):
    """What is expected at one time, or at the end where `at` is not set. Lists are complete and in order."""

    model_config = ConfigDict(extra="forbid")

    decisions: (
        tuple[
            Annotated[
                DecisionExpected,
                BeforeValidator(lambda value: {"decision": value} if isinstance(value, str) else value),
            ],
            ...,
        ]
        | None
    ) = None
    runs: tuple[RunExpected, ...] | None = None
    calls: (
        tuple[
            Annotated[
                CallExpected, BeforeValidator(lambda value: {"action": value} if isinstance(value, str) else value)
            ],
            ...,
        ]
        | None
    ) = None
    paused: bool | None = None
    breaker_open: bool | None = None


class TestEntry(LogTest):
    """One test: its timeline, and what is expected."""

    __test__ = False
    model_config = ConfigDict(extra="forbid")

    mode: Mode = Mode.ENFORCE
    max_age: Duration = timedelta(minutes=15)
    inventory: dict[str, str | tuple[str, ...]] = Field({})
    alerts: tuple[AlertEntry, ...] = ()
    orders: tuple[OrderEntry, ...] = ()
    replies: dict[str, Annotated[tuple[Reply, ...], BeforeValidator(as_list)]] = Field({})
    expect: Annotated[tuple[Check, ...], BeforeValidator(as_list), Field(min_length=1)]

    @property
    def last_moment(self) -> timedelta:
        """The time of the last entry."""
        times = [alert.at for alert in self.alerts] + [order.at for order in self.orders]
        return max(super().last_moment, *times) if times else super().last_moment


class SuiteEntry(LogSuiteEntry):
    """One document of a test file. `playbooks` and `rules` are files beside it; by default the one of the same name.
    `fixtures` is a file with lines that tests name."""

    tests: Annotated[tuple[TestEntry, ...], Field(min_length=1)]


class Suite(LogSuite, frozen=True):
    """The tests of one document, and the document, which knows the line of each value."""

    spec: SuiteEntry

    @property
    def playbooks(self) -> tuple[Path, ...]:
        """The files of the playbooks that are tested."""
        return self._beside(self.spec.playbooks) if self.spec.playbooks or not self.spec.rules else ()


def read(path: Path) -> tuple[list[Suite], list[FileProblem]]:
    """The suites of a test file, and every problem that it has."""
    documents, problems = log_test_format.documents(path)
    suites: list[Suite] = []
    for document in documents:
        spec = model_errors.validate(SuiteEntry, document)
        if isinstance(spec, list):
            problems.extend(spec)
        else:
            suites.append(Suite(path, document, spec))
    return suites, sorted(set(problems))
