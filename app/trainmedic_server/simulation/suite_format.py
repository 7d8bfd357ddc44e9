"""Playbook test format: a timeline of alerts, operator commands and replies, with expectations.

Times are durations since the test's start.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from trainmedic_core import duration, model_errors
from trainmedic_core.fields import Duration
from trainmedic_core.problems import FileProblem
from trainmedic_logs.simulation import log_test_format
from trainmedic_logs.simulation.log_test_format import LogCheck, LogSuite, LogSuiteEntry, LogTest, as_list
from trainmedic_server.domain import inventory
from trainmedic_server.domain.alert import AlertStatus
from trainmedic_server.domain.inputs import Value
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Decision, Status, StepStatus, UndoStatus


def _read_offset(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str) and value.startswith("-"):
        return -duration.check_back(duration.parse(value[1:]))
    if isinstance(value, str):
        return duration.parse(value)
    raise ValueError(f"{value!r} is not a time; write it with its unit, as 90s or -20m")


Offset = Annotated[
    timedelta, BeforeValidator(_read_offset), WithJsonSchema({"type": "string", "examples": ["-20m", "90s"]})
]
"""Test time; may be negative."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class AlertContent(_Model):
    """Labels (with ``alertname``), which identify the alert, and annotations."""

    labels: dict[str, str]
    annotations: dict[str, str] = {}


class AlertEntry(_Model):
    """Webhook delivery. Without ``starts_at``, the alert began at its first firing."""

    at: Duration = timedelta(0)
    alert: AlertContent
    status: AlertStatus = AlertStatus.FIRING
    starts_at: Offset | None = None


class SimulatedOperation(StrEnum):
    START = "start"
    SCHEDULE = "schedule"
    EVENT = "event"
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
    """Operator command for the newest run (of `playbook` and `target`, if set).

    ``start`` starts `playbook` with `inputs`, on `target` unless the playbook derives it. ``schedule`` starts it as at
    a scheduled time, ``event`` sends `event` with `labels`. ``restart`` kills the server and starts a new one `down`
    later.
    """

    at: Duration = timedelta(0)
    do: SimulatedOperation
    playbook: str | None = None
    target: str | None = None
    inputs: dict[str, Value] = {}
    event: str | None = None
    labels: dict[str, str] = {}
    by: str = "operator"
    groups: tuple[str, ...] = ()
    note: str = ""
    refused: bool = False  # True if a refusal is expected
    down: Duration = timedelta(0)

    @model_validator(mode="after")
    def _has_its_members(self) -> OrderEntry:
        if self.do in (SimulatedOperation.START, SimulatedOperation.SCHEDULE) and self.playbook is None:
            raise ValueError(f"{self.do} needs 'playbook'")
        if (self.do is SimulatedOperation.EVENT) != (self.event is not None):
            raise ValueError("do: event and 'event' belong together")
        if self.do is not SimulatedOperation.EVENT and self.labels:
            raise ValueError("only event takes 'labels'")
        if self.do is not SimulatedOperation.START and self.inputs:
            raise ValueError("only start takes 'inputs'")
        if self.down > log_test_format.LONGEST:
            raise ValueError(f"'down' is at most {duration.write(log_test_format.LONGEST)}")
        return self


class ReplyOutcome(StrEnum):
    """Outcome of an attempt: a reply's value, ``timeout`` without a reply, ``skipped`` if the action is not set up."""

    APPLIED = "applied"
    FAILED = "failed"
    REJECTED = "rejected"
    UNSUPPORTED = "unsupported"
    SKIPPED = "skipped"
    TIMEOUT = "timeout"


def _long_form(value: Any) -> Any:
    """Expand ``applied`` and ``{failed: reason}``."""
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
    after: Duration = timedelta(0)  # time that the attempt takes


Reply = Annotated[ReplyModel, BeforeValidator(_long_form)]


def _text_as(member: str) -> BeforeValidator:
    return BeforeValidator(lambda value: {member: value} if isinstance(value, str) else value)


class UndoExpected(_Model):
    """Expected undo; `params` may be a subset."""

    status: UndoStatus | None = None
    action: str | None = None
    params: dict[str, Any] | None = None


class StepExpected(_Model):
    """Expected step. Mappings may be subsets, texts substrings."""

    status: StepStatus | None = None
    params: dict[str, Any] | None = None
    output: dict[str, Any] | None = None
    attempts: int | None = None
    error: str | None = None
    message: str | None = None
    undo: Annotated[UndoExpected, _text_as("status")] | None = None


class GroupExpected(_Model):
    """Expected numbers of members; those not given are not compared."""

    total: int | None = None
    not_begun: int | None = None
    open: int | None = None
    succeeded: int | None = None
    failed: int | None = None
    skipped: int | None = None
    cancelled: int | None = None
    observed: int | None = None


class RunExpected(_Model):
    playbook: str | None = None
    target: str | None = None
    also: tuple[str, ...] | None = Field(None, description="Further targets, in order.")
    decision: Decision | None = None
    status: Status | None = None
    mode: Mode | None = None
    message: str | None = None
    alerts: int | None = Field(None, description="Number of alerts of the run, including joined ones.")
    group: GroupExpected | None = None
    steps: dict[str, Annotated[StepExpected, _text_as("status")]] = {}
    events: tuple[str, ...] | None = Field(None, description="Event kinds in this order; others may be in between.")


class CallExpected(_Model):  # of an action, with a subset of its parameters
    action: str
    target: str | None = None
    params: dict[str, Any] | None = None
    undo: bool | None = None


class DecisionExpected(_Model):
    """Expected decision of a playbook."""

    playbook: str | None = None
    target: str | None = None
    decision: Decision


class Check(LogCheck):
    """Expectations at one time, or at the end without `at`. Lists are complete and ordered."""

    model_config = ConfigDict(extra="forbid")

    decisions: tuple[Annotated[DecisionExpected, _text_as("decision")], ...] | None = None
    runs: tuple[RunExpected, ...] | None = None
    calls: tuple[Annotated[CallExpected, _text_as("action")], ...] | None = None
    paused: bool | None = None
    breaker_open: bool | None = None


def _checked_inventory(written: dict[str, Any]) -> dict[str, Any]:
    inventory.parse(written)
    return written


class TestEntry(LogTest):
    __test__ = False
    model_config = ConfigDict(extra="forbid")

    mode: Mode = Mode.ENFORCE
    max_age: Duration = timedelta(minutes=15)
    inventory: Annotated[dict[str, str | tuple[str, ...]], AfterValidator(_checked_inventory)] = Field({})
    alerts: tuple[AlertEntry, ...] = ()
    orders: tuple[OrderEntry, ...] = ()
    replies: dict[str, Annotated[tuple[Reply, ...], BeforeValidator(as_list)]] = Field({})
    expect: Annotated[tuple[Check, ...], BeforeValidator(as_list), Field(min_length=1)]

    @property
    def last_moment(self) -> timedelta:
        times = [alert.at for alert in self.alerts] + [order.at for order in self.orders]
        return max(super().last_moment, *times) if times else super().last_moment


class SuiteEntry(LogSuiteEntry):
    """Test document. `playbooks` and `rules` are files next to it, by default of the same name; `fixtures` is a file of
    lines.
    """

    tests: Annotated[tuple[TestEntry, ...], Field(min_length=1)]


class Suite(LogSuite, frozen=True):
    spec: SuiteEntry

    @property
    def playbooks(self) -> tuple[Path, ...]:
        return self._files_beside_test(self.spec.playbooks) if self.spec.playbooks or not self.spec.rules else ()


def read(path: Path) -> tuple[list[Suite], list[FileProblem]]:
    documents, problems = log_test_format.documents(path)
    suites: list[Suite] = []
    for document in documents:
        spec = model_errors.validate(SuiteEntry, document)
        if isinstance(spec, list):
            problems.extend(spec)
        else:
            suites.append(Suite(path, document, spec))
    return suites, sorted(set(problems))
