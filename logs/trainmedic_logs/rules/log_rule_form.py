"""Log rule format: pydantic models and JSON Schema."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trainmedic_core.fields import Duration, Expression, Identifier
from trainmedic_core.target import TargetKind
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.lines.rendering import MOST_LABELS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
MOST_PATTERNS = 50
Pattern = Annotated[str, Field(min_length=1, max_length=1000, description="RE2, looked for anywhere in the line.")]
Literal = Annotated[str, Field(max_length=200, description="A text of at least 3 characters that the line must hold.")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


class PatternForm(_Model):
    """Pattern with a role or cause other than the rule's."""

    pattern: Pattern
    role: Role | None = None
    cause: CauseClass | None = None


class CountForm(_Model):
    """Lines required for a finding: within ``per``, or records in a row."""

    at_least: int = Field(ge=2, le=100)
    per: Duration | None = None
    in_a_row: bool = False


class ConfirmForm(_Model):
    """Rules or alerts of which one must also occur before the alert is sent."""

    within: Duration
    by: Annotated[tuple[Identifier, ...], Field(min_length=1, max_length=20), BeforeValidator(_as_list)]


class AlertForm(_Model):
    """Alert of the rule's findings. Texts may be templates over ``fields``, ``labels``, ``target``, ``finding``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,127}$")]
    severity: str = Field("warning", description="critical, warning or info, or a template that makes one of them.")
    component: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "training"
    labels: dict[str, str] = Field({}, max_length=MOST_LABELS, description="More labels, by templates over fields.")
    summary: str = Field("", max_length=1000)
    description: str = Field("", max_length=4000)
    until: str = Field(
        "15m", description="A time without a line, or boot, attempt (the job's next), or ends (a line of `ends`)."
    )
    confirm: ConfirmForm | None = None


class LogRuleForm(_Model):
    """Log rule."""

    log_rule: Identifier = Field(description="Its name.")
    summary: str = Field("", max_length=500, description="What its lines mean, for people.")
    source: Annotated[tuple[str, ...], Field(min_length=1, max_length=20), BeforeValidator(_as_list)] = Field(
        description="training, launcher, slurm, kernel, fabric-manager, or a name of the agent's policy; or a list."
    )
    contains: Annotated[tuple[Literal, ...], Field(max_length=MOST_PATTERNS), BeforeValidator(_as_list)] = Field(
        (), description="One of these must be in the line; only there are the patterns tried."
    )
    match: Annotated[tuple[Pattern | PatternForm, ...], Field(max_length=MOST_PATTERNS), BeforeValidator(_as_list)] = (
        Field((), description="One of these takes the line. Named groups become fields.")
    )
    unless: Annotated[tuple[Pattern, ...], Field(max_length=MOST_PATTERNS), BeforeValidator(_as_list)] = ()
    record: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")] | None = Field(
        None,
        description="The event of the records that it takes, such as step; in the place of patterns or beside them.",
    )
    when: Expression | None = Field(
        None, description="A further condition, over fields; of a rule with `record`, those of the record."
    )
    general: bool = Field(False, description="It takes a line only where no other rule does.")
    role: Role
    cause: CauseClass = CauseClass.UNKNOWN
    target: TargetKind = Field(TargetKind.JOB, description="Whom its lines are about: job, node or gpu.")
    gpu: str | None = Field(None, description="Which GPU: a template over fields.")
    ends: Annotated[tuple[Pattern, ...], Field(max_length=MOST_PATTERNS), BeforeValidator(_as_list)] = Field(
        (), description="Lines that end the finding whose fields are the same."
    )
    lasting: Duration = Field(timedelta(0), alias="for", description="How long no line may end it.")
    count: CountForm | None = None
    alert: AlertForm | None = None


def log_rule_schema() -> dict[str, Any]:
    made = LogRuleForm.model_json_schema(by_alias=True)
    properties = made["properties"]
    for name in ("source", "contains", "match", "unless", "ends"):
        several = properties[name]
        # A single value may stand without its list.
        properties[name] = {
            **{key: several.pop(key) for key in ("title", "description", "default") if key in several},
            "anyOf": [several["items"], several],
        }
    return {"$schema": DIALECT, **made, "title": "Trainmedic log rule"}
