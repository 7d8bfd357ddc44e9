"""Models of the playbook language, for validation and its JSON Schema."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
)

from trainmedic.wire.envelope import write_time
from trainmedic_core import duration
from trainmedic_core.fields import Duration, Expression, Identifier
from trainmedic_core.target import TargetKind
from trainmedic_server.domain.cron import CronWindow
from trainmedic_server.domain.inputs import read_time
from trainmedic_server.domain.modes import Mode as Mode
from trainmedic_server.domain.modes import UndoTrigger as UndoTrigger
from trainmedic_server.domain.playbook_target import JOBS as JOBS
from trainmedic_server.domain.playbook_target import ON_NODE, OneTargetKind, kind_of_target
from trainmedic_server.domain.playbook_target import GroupTarget as GroupTarget
from trainmedic_server.domain.playbook_target import TargetParts as TargetParts
from trainmedic_server.domain.question_form import AskingForm, LastResort, OnTimeout
from trainmedic_server.domain.question_form import Escalation as Escalation
from trainmedic_server.domain.question_form import PlaybookModel as _Model
from trainmedic_server.domain.question_form import Question as Question
from trainmedic_server.domain.shares import Batch, Share, part_of
from trainmedic_server.domain.trigger import MOST_MATCHERS as MOST_MATCHERS
from trainmedic_server.domain.trigger import Trigger

APPROVAL = "approval"  # ID of mode approve's question before the first step. No playbook step may have it.

PROMETHEUS_QUERY = "prometheus.query"  # action that a wait for a query repeats

MOST_WINDOWS = 20
MOST_STEPS = 200  # limit per list of steps: checking and planning time grow with each pair


def _as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) or value is None else (value,)


class Rollout(_Model):
    """How a group's members follow each other."""

    serial: Annotated[tuple[Batch, ...], BeforeValidator(_as_list), Field(min_length=1, max_length=100)] | None = Field(
        None, description="Size of each batch: a number, a percentage, or a list whose last entry repeats. "
        "Default: 1, then double. Percentages round up."
    )  # fmt: skip
    max_errors: Share = Field(
        0, description="Failed members of the whole run, beyond which no further one starts. Percentages round down."
    )
    order: Literal["idle_first", "name", "random"] = Field(
        "name", description="idle_first: members without a job first."
    )
    max_unavailable: Share | None = Field(
        None,
        description="Unavailable nodes of the selected pool, beyond which no member starts. Percentages round down, to "
        "1 at least; default: no limit.",
    )
    check: tuple[Step, ...] = Field(
        (), max_length=MOST_STEPS, description="The parent's steps after each batch; the next one starts if they hold."
    )

    def batch(self, index: int, members: int) -> int:
        """Return the size of a batch, numbered from 0."""
        if self.serial is None:
            return min(1 << min(index, 32), members)
        size = part_of(self.serial[min(index, len(self.serial) - 1)], members, up=True)
        return max(1, min(size, members))

    def errors_allowed(self, members: int) -> int:
        return part_of(self.max_errors, members)

    def unavailable_allowed(self, nodes: int) -> int:
        """Requires `max_unavailable`."""
        most = self.max_unavailable
        assert most is not None
        return max(part_of(most, nodes), 1) if most else 0


class RateLimit(_Model):
    """At most `count` runs of the playbook started in any window of length `per`."""

    count: int = Field(ge=1)
    per: Duration
    per_target: bool = Field(False, description="Count the runs of each target alone.")


class Again(_Model):
    """Further runs while the alert still fires."""

    after: Duration = Field(description="Time from the end of the last run on the alert.")
    times: int = Field(ge=1, le=100, description="Further runs for one alert; those that people start do not count.")


class Guards(_Model):
    """Limits on how often and on how much a playbook acts."""

    cooldown: Duration | None = Field(None, description="Minimum time after the end of the last run on the target.")
    max_runs: RateLimit | None = None
    max_concurrent: int | None = Field(None, ge=1, description="Open runs of this playbook at once.")
    queue: Duration | None = Field(
        None, description="How long further runs wait for their turn in max_concurrent; default: refused."
    )
    again: Again | None = Field(None, description="Further runs while the alert still fires.")
    on_limited: tuple[ActionStep, ...] = Field(
        (), max_length=MOST_STEPS, description="Steps for the first run that max_runs refuses within its time."
    )
    min_available: Share | None = Field(None, description="Nodes, without the target's, that must be available.")


MOST_ATTEMPTS = 100


class Retry(_Model):
    """Attempts of an action: `attempts` in all, waiting `delay` × `backoff`^(n-1) after the n-th."""

    attempts: int = Field(1, ge=1, le=MOST_ATTEMPTS)
    delay: Duration = Field(default="2s", validate_default=True)
    backoff: float = Field(2.0, ge=1.0, le=10.0)
    max_delay: Duration = Field(default="5m", validate_default=True)

    def delay_after(self, number: int) -> timedelta:
        seconds = self.delay.total_seconds() * self.backoff ** (number - 1)  # may be too many for a timedelta
        return timedelta(seconds=seconds) if seconds < self.max_delay.total_seconds() else self.max_delay


class MeasuredEffect(_Model):
    """Metric that shows whether a run helped, instead of the alert rule's metric."""

    query: str = Field(min_length=1, max_length=4096, description="PromQL; templates only within quotes.")
    better: Literal["lower", "higher"]


class _Step(_Model):
    id: Identifier | None = Field(None, description="For steps.<id> in expressions; step-<n> by default.")
    when: Expression | None = Field(None, description="Skip the step unless this holds.")
    timeout: Duration | None = None
    """None: for an action, its default; for a wait or approval, no limit."""
    on_error: Literal["fail", "continue"] = "fail"


class OwnUndo(_Model):
    """How a step is reverted whose action has no undo of its own."""

    when: UndoTrigger = UndoTrigger.ON_RESOLVE
    action: str
    with_: dict[str, Any] = Field(default_factory=dict, alias="with", description="The action's parameters.")


# Tags of union members become parts of pydantic's error paths, from which `model_errors` removes them.
def _kind_of_undo(value: Any) -> str:
    return "OwnUndo" if isinstance(value, (dict, OwnUndo)) else "enum[UndoTrigger]"


class ActionStep(_Step):
    """A step that acts. `timeout` bounds one attempt; the action has a default."""

    action: str
    target: Literal["node", "gpu", "jobs"] | None = Field(
        None, description="Which of the playbook's targets, if it has several and the action could work on each."
    )
    with_: dict[str, Any] = Field(default_factory=dict, alias="with", description="The action's parameters.")
    retry: Retry = Retry()
    undo: Annotated[
        Annotated[UndoTrigger, Tag("enum[UndoTrigger]")] | Annotated[OwnUndo, Tag("OwnUndo")],
        Discriminator(_kind_of_undo),
    ] = UndoTrigger.NEVER

    @property
    def undo_trigger(self) -> UndoTrigger:
        return self.undo.when if isinstance(self.undo, OwnUndo) else self.undo

    @property
    def own_undo(self) -> OwnUndo | None:
        return self.undo if isinstance(self.undo, OwnUndo) else None


def _has_key(value: Any, key: str) -> bool:
    return key in value if isinstance(value, dict) else hasattr(value, key)


def _checked_delay(value: Any) -> str:
    if isinstance(value, str):
        if "{{" not in value:
            duration.parse(value)
        return value
    raise ValueError(f"{value!r} is not a duration; write it with its unit: 90s, 10m, 1h30m")


def _checked_time(text: str) -> str:
    return text if "{{" in text else write_time(read_time(text))


class WaitStep(_Step):
    """A step that waits until all alerts of the run have resolved."""

    wait_for: Literal["resolved"]
    on_timeout: Literal["fail", "continue"] = "fail"


class _Polled(_Model):
    for_: Duration = Field(
        default="0s", alias="for", validate_default=True, description="How long it must hold without a break."
    )
    every: Duration = Field(
        default="30s", validate_default=True, ge=timedelta(seconds=1), le=timedelta(hours=1), description="Interval."
    )


class PolledQuery(_Polled):
    """Holds while the query has a sample."""

    query: str = Field(min_length=1, max_length=4096, description="PromQL; templates only within quotes.")


class PolledAction(_Polled):
    """Holds while the action is applied, and `until` is true."""

    action: str
    with_: dict[str, Any] = Field(default_factory=dict, alias="with", description="The action's parameters.")
    until: Expression | None = Field(None, description="A condition over its output, as output.<key>.")


class PollStep(_Step):
    """A step that waits until a query or an action holds."""

    wait_for: Annotated[
        Annotated[PolledQuery, Tag("PolledQuery")] | Annotated[PolledAction, Tag("PolledAction")],
        Discriminator(lambda value: "PolledQuery" if _has_key(value, "query") else "PolledAction"),
    ]
    on_timeout: Literal["fail", "continue"] = "fail"


class DelayStep(_Step):
    """A step that waits for some time."""

    wait: Annotated[str, BeforeValidator(_checked_delay)] = Field(description="A duration, or a template for one.")


class UntilStep(_Step):
    """A step that waits until a time. One in the past ends at once."""

    wait_until: Annotated[str, AfterValidator(_checked_time)] = Field(
        description="A time with its zone, such as 2026-01-31T12:00:00Z, or a template for one."
    )


class ApproveStep(_Step):
    """A step that waits for people."""

    approve: str | Question
    on_timeout: OnTimeout = "fail"

    @property
    def question(self) -> Question:
        return Question(message=self.approve) if isinstance(self.approve, str) else self.approve

    def without_answer(self, on_timeout: str) -> str:  # what follows, as stated to people
        if on_timeout in ("fail", "reject") and self.question.ask_again is not None:
            return "ask_again"
        return "continue" if on_timeout == "fail" and self.on_error == "continue" else on_timeout

    @property
    def last_resort(self) -> LastResort:
        """Outcome if no approvers are left to ask."""
        if self.on_timeout != "escalate":
            return self.on_timeout
        return self.question.escalate.on_timeout if self.question.escalate else "fail"


class Approval(AskingForm):
    """How mode approve asks before a run acts."""

    timeout: Duration | None = Field(default="1h", validate_default=True)
    ask_again: Duration | None = Field(default="30m", validate_default=True)
    on_timeout: OnTimeout = "reject"

    @cached_property
    def step(self) -> ApproveStep:
        asked = {name: getattr(self, name) for name in AskingForm.model_fields}
        if self.timeout is None or self.on_timeout not in ("fail", "reject"):
            asked["ask_again"] = None  # the default is valid only with these two
        question = Question.model_construct(**asked)
        return ApproveStep.model_construct(
            id=APPROVAL, approve=question, timeout=self.timeout, on_timeout=self.on_timeout
        )


def _kind_of_step(value: Any) -> str:
    keys = set(value) if isinstance(value, dict) else set(getattr(value, "model_fields_set", ()))
    for key in ("wait_for", "approve", "wait", "wait_until"):
        if key in keys:
            written = value.get(key) if isinstance(value, dict) else getattr(value, key)
            return "poll" if key == "wait_for" and not isinstance(written, str) else key
    return "action"


Step = Annotated[
    Annotated[ActionStep, Tag("action")]
    | Annotated[WaitStep, Tag("wait_for")]
    | Annotated[PollStep, Tag("poll")]
    | Annotated[DelayStep, Tag("wait")]
    | Annotated[UntilStep, Tag("wait_until")]
    | Annotated[ApproveStep, Tag("approve")],
    Discriminator(_kind_of_step),
]


OnlyDuring = Annotated[
    Annotated[CronWindow, Tag("CronWindow")]
    | Annotated[tuple[CronWindow, ...], Field(min_length=1, max_length=MOST_WINDOWS), Tag("tuple[CronWindow]")],
    Discriminator(lambda value: "tuple[CronWindow]" if isinstance(value, (list, tuple)) else "CronWindow"),
]


class Playbook(_Model):
    """One YAML document: what it reacts to, its guards, its steps."""

    playbook: Identifier = Field(description="The playbook's name, unique among those loaded.")
    summary: str = ""
    mode: Mode = Mode.ENFORCE  # The server's mode may allow less
    on: Trigger
    priority: int = Field(0, ge=-1000, le=1000, description="Higher ones first, among those that answer one alert.")
    exclusive: bool = Field(False, description="It alone acts, among those that answer one alert on one target.")
    target: Annotated[
        Annotated[OneTargetKind, Tag("enum[TargetKind]")]
        | Annotated[TargetParts, Tag("TargetParts")]
        | Annotated[GroupTarget, Tag("GroupTarget")],
        Discriminator(kind_of_target),
    ]
    """A kind, resolved from the alert's labels; templates for names; or a group's selector."""
    rollout: Rollout | None = None
    vars: dict[Identifier, Any] = Field(default_factory=dict, description="Constants, as vars.<name>.")
    only_during: OnlyDuring | None = Field(
        None, description="Times at which it may start, and begin its harmful steps; default: always."
    )
    guards: Guards = Guards()
    approval: Approval = Approval()
    steps: tuple[Step, ...] = Field(min_length=1, max_length=MOST_STEPS)
    on_success: tuple[Step, ...] = Field((), max_length=MOST_STEPS, description="Run when the run succeeds.")
    on_failure: tuple[Step, ...] = Field((), max_length=MOST_STEPS, description="Run when the run fails.")
    effect: MeasuredEffect | None = None  # None to measure the alert rule's metric
    fragments: dict[str, str] = Field(
        default_factory=dict,
        description="Texts of the fragments that steps use, by name. One that is not given here is read from the "
        "playbook's folder when the playbook is loaded, and becomes part of it.",
    )
    files: dict[str, str] = Field(
        default_factory=dict,
        description="Templates that steps name, by file name. One that is not given here is read from the playbook's "
        "folder when the playbook is loaded, and becomes part of it.",
    )

    @property
    def name(self) -> str:
        return self.playbook

    @property
    def begins_with(self) -> tuple[str, ...]:  # names of alerts or stand-ins (`domain.beginnings`)
        return self.on.begins_with(self.playbook)

    @property
    def windows(self) -> tuple[CronWindow, ...]:
        """Empty if it may act at any time."""
        return (self.only_during,) if isinstance(self.only_during, CronWindow) else self.only_during or ()

    @property
    def on_limited(self) -> tuple[ActionStep, ...]:
        return self.guards.on_limited

    @property
    def target_kind(self) -> TargetKind:
        """In a group, the kind of its members."""
        return self.target if isinstance(self.target, TargetKind) else self.target.kind

    @property
    def group(self) -> GroupTarget | None:
        return self.target if isinstance(self.target, GroupTarget) else None

    @property
    def has_jobs(self) -> bool:
        """True if the jobs on its node are targets too."""
        return getattr(self.target, JOBS, None) == ON_NODE

    def phase(self, name: str) -> tuple[Step, ...]:
        if name == CHECK:
            return self.rollout.check if self.rollout is not None else ()
        steps: tuple[Step, ...] = getattr(self, name)
        return steps


CHECK = "check"
PHASES = ("steps", CHECK, "on_success", "on_failure")
"""Lists of steps in stored order. A run executes at most one of the last two."""
ON_LIMITED = "on_limited"
EVERY_PHASE = (*PHASES, ON_LIMITED)
_ID_PREFIXES = {
    "steps": "step",
    CHECK: "check",
    "on_success": "success",
    "on_failure": "failure",
    ON_LIMITED: "limited",
}
_SECTIONS = {CHECK: "rollout", ON_LIMITED: "guards"}


def place_of(phase: str) -> tuple[str, ...]:
    """Return the path of the phase's steps in the YAML document."""
    return (_SECTIONS[phase], phase) if phase in _SECTIONS else (phase,)


FREE_WAITS = (PollStep, DelayStep, UntilStep)
"""Waits for a query, action or time. During them, a run that has not acted locks nothing."""


def step_id(step: _Step, index: int, phase: str = "steps") -> str:
    return step.id or default_id(index, phase)


def default_id(index: int, phase: str) -> str:
    return f"{_ID_PREFIXES[phase]}-{index + 1}"
