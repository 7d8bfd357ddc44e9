from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trainmedic_core.fields import Expression, Identifier, Lookback
from trainmedic_core.target import TargetKind
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.lines.rendering import MOST_LABELS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
MOST_PATTERNS = 50
Pattern = Annotated[
    str, Field(min_length=1, max_length=1000, description="RE2 pattern, searched anywhere in the line.")
]
Literal = Annotated[str, Field(max_length=200, description="Text of at least 3 characters that the line must contain.")]


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
    per: Lookback | None = None
    in_a_row: bool = False


class ConfirmForm(_Model):
    """Rules or alerts of which one must also occur before the alert is sent."""

    within: Lookback
    by: Annotated[tuple[Identifier, ...], Field(min_length=1, max_length=20), BeforeValidator(_as_list)]


class AlertForm(_Model):
    """Alert of the rule's findings. Texts may be templates over ``fields``, ``labels``, ``target``, ``finding``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,127}$")]
    severity: str = Field("warning", description="critical, warning, info, or a template of one of them.")
    component: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "training"
    labels: dict[str, str] = Field({}, max_length=MOST_LABELS, description="Additional labels: templates over fields.")
    summary: str = Field("", max_length=1000)
    description: str = Field("", max_length=4000)
    until: str = Field(
        "15m", description="A time without a line, or boot, attempt (the job's next), or ends (a line of `ends`)."
    )
    confirm: ConfirmForm | None = None


class LogRuleForm(_Model):
    """Log rule."""

    log_rule: Identifier = Field(description="Name of the rule.")
    summary: str = Field("", max_length=500, description="Meaning of the lines, for people.")
    source: Annotated[tuple[str, ...], Field(min_length=1, max_length=20), BeforeValidator(_as_list)] = Field(
        description="training, launcher, slurm, kernel, fabric-manager, or a name of the agent's policy; or a list."
    )
    contains: Annotated[tuple[Literal, ...], Field(max_length=MOST_PATTERNS), BeforeValidator(_as_list)] = Field(
        (), description="The line must contain one of these before patterns are tried."
    )
    match: Annotated[tuple[Pattern | PatternForm, ...], Field(max_length=MOST_PATTERNS), BeforeValidator(_as_list)] = (
        Field((), description="One of these must match. Named groups become fields.")
    )
    unless: Annotated[tuple[Pattern, ...], Field(max_length=MOST_PATTERNS), BeforeValidator(_as_list)] = ()
    record: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")] | None = Field(
        None,
        description="Event of the records to match, such as step; instead of patterns or in addition.",
    )
    when: Expression | None = Field(
        None, description="Further condition over fields; with `record`, over the members of records."
    )
    general: bool = Field(False, description="Matches only lines that no other rule matches.")
    role: Role
    cause: CauseClass = CauseClass.UNKNOWN
    target: TargetKind = Field(TargetKind.JOB, description="Object of the lines: job, node or gpu.")
    gpu: str | None = Field(None, description="GPU of the line: a template over fields.")
    ends: Annotated[tuple[Pattern, ...], Field(max_length=MOST_PATTERNS), BeforeValidator(_as_list)] = Field(
        (), description="Patterns of lines that end the finding with the same fields."
    )
    lasting: Lookback = Field(
        timedelta(0), alias="for", description="Time for which no line may end it before it is reported."
    )
    count: CountForm | None = None
    alert: AlertForm | None = None


def _allow_single(properties: dict[str, Any], name: str) -> None:
    several = properties[name]
    properties[name] = {
        **{key: several.pop(key) for key in ("title", "description", "default") if key in several},
        "anyOf": [several["items"], several],  # a single value may stand without its list
    }


def log_rule_schema() -> dict[str, Any]:
    made = LogRuleForm.model_json_schema(by_alias=True)
    for name in ("source", "contains", "match", "unless", "ends"):
        _allow_single(made["properties"], name)
    _allow_single(made["$defs"]["ConfirmForm"]["properties"], "by")
    return {"$schema": DIALECT, **made, "title": "Trainmedic log rule"}
