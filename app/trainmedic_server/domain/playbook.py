"""Models of the playbook language, for validation and its JSON Schema."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trainmedic.wire.envelope import write_time
from trainmedic_core import duration
from trainmedic_core.fields import Duration, Expression, Identifier
from trainmedic_core.target import TargetKind
from trainmedic_server.domain.cron import CronWindow
from trainmedic_server.domain.inputs import MOST_INPUTS, Input, InputName, read_time
from trainmedic_server.domain.modes import Mode as Mode
from trainmedic_server.domain.modes import UndoTrigger as UndoTrigger
from trainmedic_server.domain.proof import AlertProof
from trainmedic_server.domain.selectors import MEMBER_KINDS
from trainmedic_server.domain.shares import Batch, Share, part_of


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)


APPROVAL = "approval"
"""ID of mode approve's question before the first step. No playbook step may have it."""

PROMETHEUS_QUERY = "prometheus.query"
"""The action that a wait for a query repeats."""

MOST_MATCHERS = 100
MOST_WINDOWS = 20
MOST_STEPS = 200
"""Limit per list of steps: checking and planning time grow with each pair."""


Approver = Annotated[str, Field(min_length=1, max_length=128)]
Approvers = Annotated[tuple[Approver, ...], Field(max_length=100)]


class Manual(_Model):
    """Start by people only."""

    by: Approvers = Field((), description="Who may start it: user:NAME, group:NAME, or a name of either; default: any.")
    inputs: dict[InputName, Input] = Field(default_factory=dict, max_length=MOST_INPUTS)


class Trigger(_Model):
    """The playbook's beginning: alerts that it reacts to, or a start by people."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["alert"]}, {"required": ["manual"]}]})

    alert: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None, description="The alertname, or a list of them."
    )
    manual: Manual | None = Field(None, description="Only people start it.")
    matchers: tuple[str, ...] = Field(
        (), max_length=MOST_MATCHERS, description="Alertmanager matchers; all of them must hold."
    )
    when: Expression | None = Field(None, description="A further condition, over the alert.")
    proof: AlertProof | Annotated[tuple[AlertProof, ...], Field(min_length=1)] | None = Field(
        None, description="Proof that the alert must give in addition to its name: one of these is enough."
    )

    @property
    def proofs(self) -> tuple[AlertProof, ...]:
        """Proofs of which one suffices. Empty if none is required."""
        return (self.proof,) if isinstance(self.proof, AlertProof) else self.proof or ()

    @property
    def alertnames(self) -> tuple[str, ...]:
        """Empty if no alert begins the playbook."""
        return (self.alert,) if isinstance(self.alert, str) else self.alert or ()

    @model_validator(mode="after")
    def _is_one_beginning(self) -> Trigger:
        if self.manual is None and self.alert is None:
            raise ValueError("'alert' is missing")
        if self.manual is not None and self.alert is not None:
            raise ValueError("names one beginning: alert or manual, not both")
        if self.manual is not None and (self.matchers or self.when or self.proof):
            raise ValueError("matchers, when and proof are conditions on an alert; manual has none")
        return self


class TargetParts(_Model):
    """Parts of the target as templates, for labels that are not built in."""

    node: str | None = None
    gpu: str | None = None
    """UUID, PCI address or index on the node."""
    job: str | None = None
    """Name, or what the job uses: ``node:…``, ``gpu:…`` or ``pod:…`` (``job_lookup``)."""

    @model_validator(mode="after")
    def _names_one_thing(self) -> TargetParts:
        if self.job is not None and (self.node is not None or self.gpu is not None):
            raise ValueError("name a job, or a node, or a gpu with its node; not a job and a node")
        if self.gpu is not None and self.node is None:
            raise ValueError("a gpu needs its node too")
        if self.job is None and self.node is None:
            raise ValueError("name at least a node or a job")
        return self

    @property
    def kind(self) -> TargetKind:
        if self.job is not None:
            return TargetKind.JOB
        return TargetKind.GPU if self.gpu is not None else TargetKind.NODE


Attribute = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,252}$")]
_Values = Annotated[
    Annotated[str, Field(min_length=1), Tag("str")]
    | Annotated[tuple[str, ...], Field(min_length=1, max_length=1000), Tag("tuple[str]")],
    Discriminator(lambda value: "tuple[str]" if isinstance(value, (list, tuple)) else "str"),
]


def _written_out(value: Any) -> Any:
    """All is never the meaning of nothing."""
    if value == "on_node":
        raise ValueError("on_node is no group; this release has no several targets in a run")
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        raise ValueError(f"names are written as a condition: {{name: [{', '.join(value[:3])}]}}")
    if isinstance(value, str) and value != "all":
        raise ValueError(f"write {{name: {value!r}}} for names, {{pool: h100}} for an attribute, or all")
    if not value:
        raise ValueError("name conditions, such as {pool: h100}, or write all")
    return value


Selected = Annotated[
    Annotated[Literal["all"], Tag("literal")] | Annotated[dict[Attribute, _Values], Field(max_length=20), Tag("dict")],
    Discriminator(lambda value: "dict" if isinstance(value, dict) else "literal"),
    BeforeValidator(_written_out),
]
"""``all``, or conditions on topology attributes: the value, or a list of possible ones."""


class GroupTarget(_Model):
    """A group of targets, resolved once when the run starts. Each member gets a run of its own."""

    gpus: Selected = "all"
    nodes: Selected = "all"
    """By attributes; ``name`` is a node name or host list."""
    jobs: Selected = "all"
    """By attributes of their nodes, ``name`` (of the job) or ``on_nodes`` (a host list)."""

    @model_validator(mode="after")
    def _is_one_group(self) -> GroupTarget:
        if len(self.model_fields_set) != 1:
            raise ValueError("name one of gpus, nodes and jobs: a playbook works on one group")
        return self

    @property
    def plural(self) -> str:
        return next(iter(self.model_fields_set))

    @property
    def kind(self) -> TargetKind:
        """Kind of the members."""
        return MEMBER_KINDS[self.plural]

    @property
    def selected(self) -> Selected:
        written: Selected = getattr(self, self.plural)
        return written


def _kind_of_target(value: Any) -> str:
    if isinstance(value, GroupTarget) or (isinstance(value, dict) and value.keys() & MEMBER_KINDS.keys()):
        return "GroupTarget"
    return "TargetParts" if isinstance(value, (dict, TargetParts)) else "enum[TargetKind]"


def _one_kind(value: Any) -> Any:
    if value == TargetKind.GROUP:
        raise ValueError("write a group as its selector, such as target: {nodes: {pool: h100}}")
    if value not in _KINDS:
        raise PydanticCustomError("enum", "must be one of {expected}", {"expected": ", ".join(map(repr, _KINDS))})
    return value


_KINDS = tuple(str(kind) for kind in TargetKind if kind is not TargetKind.GROUP)
OneTargetKind = Annotated[
    TargetKind, BeforeValidator(_one_kind), WithJsonSchema({"type": "string", "enum": list(_KINDS)})
]


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) or value is None else (value,)


class Rollout(_Model):
    """How a group's members follow each other."""

    serial: Annotated[tuple[Batch, ...], BeforeValidator(_listed), Field(min_length=1, max_length=100)] | None = Field(
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
        most = self.max_unavailable
        assert most is not None
        return max(part_of(most, nodes), 1) if most else 0


class RateLimit(_Model):
    """At most `count` runs of the playbook started in any window of length `per`."""

    count: int = Field(ge=1)
    per: Duration
    per_target: bool = Field(False, description="Count the runs of each target alone.")


class Guards(_Model):
    """Limits on how often and on how much a playbook acts."""

    cooldown: Duration | None = Field(None, description="Minimum time after the end of the last run on the target.")
    max_runs: RateLimit | None = None
    """None for no limit."""
    max_concurrent: int | None = Field(None, ge=1, description="Open runs of this playbook at once.")
    queue: Duration | None = Field(
        None, description="How long further runs wait for their turn in max_concurrent; default: refused."
    )


class Retry(_Model):
    """Attempts of an action: `attempts` in all, waiting `delay` × `backoff`^(n-1) after the n-th."""

    attempts: int = Field(1, ge=1, le=100)
    delay: Duration = Field(default="2s", validate_default=True)
    backoff: float = Field(2.0, ge=1.0, le=10.0)
    """Factor from each wait to the next."""
    max_delay: Duration = Field(default="5m", validate_default=True)


class MeasuredEffect(_Model):
    """Metric that shows whether a run helped, instead of the alert rule's metric."""

    query: str = Field(min_length=1, max_length=4096, description="PromQL; templates only within quotes.")
    better: Literal["lower", "higher"]


class _Step(_Model):
    id: Identifier | None = Field(None, description="For steps.<id> in expressions; step-<n> by default.")
    when: Expression | None = Field(None, description="Skip the step unless this holds.")
    timeout: Duration | None = None
    """For an action: of one attempt, None for the action's default. For a wait or approval: None for no limit."""
    on_error: Literal["fail", "continue"] = "fail"


class OwnUndo(_Model):
    """How a step is reverted whose action has no undo of its own."""

    when: UndoTrigger = UndoTrigger.ON_RESOLVE
    action: str
    with_: dict[str, Any] = Field(default_factory=dict, alias="with", description="The action's parameters.")


def _kind_of_undo(value: Any) -> str:
    return "OwnUndo" if isinstance(value, (dict, OwnUndo)) else "enum[UndoTrigger]"


class ActionStep(_Step):
    """A step that acts. `timeout` bounds one attempt; the action has a default."""

    action: str
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


def _has(value: Any, key: str) -> bool:
    return key in value if isinstance(value, dict) else hasattr(value, key)


def _delay(value: Any) -> str:
    if isinstance(value, str):
        if "{{" not in value:
            duration.parse(value)
        return value
    raise ValueError(f"{value!r} is not a duration; write it with its unit: 90s, 10m, 1h30m")


def _moment(text: str) -> str:
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
        Discriminator(lambda value: "PolledQuery" if _has(value, "query") else "PolledAction"),
    ]
    on_timeout: Literal["fail", "continue"] = "fail"


class DelayStep(_Step):
    """A step that waits for some time."""

    wait: Annotated[str, BeforeValidator(_delay)] = Field(description="A duration, or a template for one.")


class UntilStep(_Step):
    """A step that waits until a time. One in the past ends at once."""

    wait_until: Annotated[str, AfterValidator(_moment)] = Field(
        description="A time with its zone, such as 2026-01-31T12:00:00Z, or a template for one."
    )


LastResort = Literal["fail", "continue", "reject", "approve"]


class Escalation(_Model):
    """The next approvers if no one answers in time, and what follows if they do not answer either."""

    by: Annotated[Approvers, Field(min_length=1)]
    """Further approvers, in the form of a question's ``by``."""
    to: str | None = Field(None, description="Notification channel; default: all.")
    timeout: Duration | None = None
    """None for the first question's timeout."""
    on_timeout: LastResort = "fail"


class _Asking(_Model):
    """How people are asked."""

    message: str = Field("", description="A template: what is asked.")
    by: Approvers = Field(
        (), description="Approvers: user:NAME, group:NAME, or a name of either; default: any operator."
    )
    count: int = Field(1, ge=1, le=20, description="Number of different people who must approve.")
    remind: Duration | None = Field(None, description="Interval of reminders until an answer.")
    ask_again: Duration | None = Field(
        None, description="Delay after a timeout until the question is asked again, while the alert fires."
    )
    to: str | None = Field(None, description="Notification channel; default: all.")
    escalate: Escalation | None = Field(None, description="Next approvers, with on_timeout: escalate.")


class Question(_Asking):
    """A question to people."""


OnTimeout = Literal["fail", "continue", "reject", "approve", "escalate"]


class ApproveStep(_Step):
    """A step that waits for people."""

    approve: str | Question
    on_timeout: OnTimeout = "fail"

    @property
    def question(self) -> Question:
        return Question(message=self.approve) if isinstance(self.approve, str) else self.approve

    @property
    def last_resort(self) -> LastResort:
        """Outcome if no approvers are left to ask."""
        if self.on_timeout != "escalate":
            return self.on_timeout
        return self.question.escalate.on_timeout if self.question.escalate else "fail"


class Approval(_Asking):
    """How mode approve asks before a run acts."""

    timeout: Duration | None = Field(default="1h", validate_default=True)
    """None for no limit."""
    ask_again: Duration | None = Field(default="30m", validate_default=True)
    on_timeout: OnTimeout = "reject"

    @cached_property
    def step(self) -> ApproveStep:
        asked = {name: getattr(self, name) for name in _Asking.model_fields}
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
    mode: Mode = Mode.ENFORCE
    """The most it may do; the server's mode may allow less."""
    on: Trigger
    priority: int = Field(0, ge=-1000, le=1000, description="Higher ones first, among those that answer one alert.")
    exclusive: bool = Field(False, description="It alone acts, among those that answer one alert on one target.")
    target: Annotated[
        Annotated[OneTargetKind, Tag("enum[TargetKind]")]
        | Annotated[TargetParts, Tag("TargetParts")]
        | Annotated[GroupTarget, Tag("GroupTarget")],
        Discriminator(_kind_of_target),
    ]
    """A kind, resolved from the alert's labels, templates for names, or the selector of a group."""
    rollout: Rollout | None = None
    """Only for a group. None for the defaults."""
    vars: dict[Identifier, Any] = Field(default_factory=dict, description="Constants, as vars.<name>.")
    only_during: OnlyDuring | None = Field(
        None, description="Times at which it may start, and begin its harmful steps; default: always."
    )
    guards: Guards = Guards()
    approval: Approval = Approval()
    steps: tuple[Step, ...] = Field(min_length=1, max_length=MOST_STEPS)
    on_success: tuple[Step, ...] = Field((), max_length=MOST_STEPS, description="Run when the run succeeds.")
    on_failure: tuple[Step, ...] = Field((), max_length=MOST_STEPS, description="Run when the run fails.")
    effect: MeasuredEffect | None = None
    """None to measure the alert rule's metric."""
    files: dict[str, str] = Field(
        default_factory=dict,
        description="Templates that steps name, by file name. One that is not given here is read from the playbook's "
        "folder when the playbook is loaded, and becomes part of it.",
    )

    @property
    def name(self) -> str:
        return self.playbook

    @property
    def windows(self) -> tuple[CronWindow, ...]:
        """Empty if it may act at any time."""
        return (self.only_during,) if isinstance(self.only_during, CronWindow) else self.only_during or ()

    @property
    def target_kind(self) -> TargetKind:
        """Kind of what the steps work on: in a group, of its members."""
        return self.target if isinstance(self.target, TargetKind) else self.target.kind

    @property
    def group(self) -> GroupTarget | None:
        return self.target if isinstance(self.target, GroupTarget) else None

    def phase(self, name: str) -> tuple[Step, ...]:
        """Return one of the `PHASES`."""
        if name == CHECK:
            return self.rollout.check if self.rollout is not None else ()
        steps: tuple[Step, ...] = getattr(self, name)
        return steps


CHECK = "check"
"""Phase of ``rollout.check``."""
PHASES = ("steps", CHECK, "on_success", "on_failure")
"""Step lists in the order in which a run stores them. One of the last two is executed."""
_NAMED = {"steps": "step", CHECK: "check", "on_success": "success", "on_failure": "failure"}


def place_of(phase: str) -> tuple[str, ...]:
    """Return the path of a phase in the document."""
    return ("rollout", CHECK) if phase == CHECK else (phase,)


FREE_WAITS = (PollStep, DelayStep, UntilStep)
"""Waits that hold no lock before the first action."""


def step_id(step: _Step, index: int, phase: str = "steps") -> str:
    return step.id or default_id(index, phase)


def default_id(index: int, phase: str) -> str:
    """Return ``step-<n>``, ``check-<n>``, ``success-<n>`` or ``failure-<n>``, counted from 1."""
    return f"{_NAMED[phase]}-{index + 1}"
