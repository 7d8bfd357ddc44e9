"""Models of ``on``: the beginning of a playbook."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from trainmedic_core.fields import Expression, Identifier
from trainmedic_server.domain import beginnings, cron
from trainmedic_server.domain.cron import Schedule, TimeZone
from trainmedic_server.domain.inputs import MOST_INPUTS, Input, InputName
from trainmedic_server.domain.proof import AlertProof
from trainmedic_server.domain.question_form import Approvers, PlaybookModel

MOST_MATCHERS = 100


class Manual(PlaybookModel):
    """Start by people only."""

    by: Annotated[Approvers, Field(min_length=1)] = Field(
        (), description="Who may start it: user:NAME, group:NAME, or a name of either; default: any."
    )
    inputs: dict[InputName, Input] = Field(default_factory=dict, max_length=MOST_INPUTS)


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _one_or_list(item: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item, "minItems": 1}]})


EndStatus = Literal["succeeded", "failed", "cancelled", "rejected"]
_ENDS = {"type": "string", "enum": ["succeeded", "failed", "cancelled", "rejected"]}
Names = Annotated[
    tuple[Identifier, ...],
    BeforeValidator(_as_tuple),
    Field(min_length=1, max_length=100),
    _one_or_list({"type": "string"}),
]
Statuses = Annotated[
    tuple[EndStatus, ...], BeforeValidator(_as_tuple), Field(min_length=1, max_length=4), _one_or_list(_ENDS)
]


_AlertName = Annotated[str, Field(min_length=1)]


class EndedRuns(PlaybookModel):
    """Ends of other playbooks' runs."""

    playbook: Names = Field(description="The playbook whose run ended, or a list.")
    status: Statuses = Field(description="How the run ended, or a list.")


_BEGINNINGS = ("alert", "manual", "schedule", "run", "event")


class Trigger(PlaybookModel):
    """The playbook's beginning: alerts that it reacts to, people, a schedule, ends of other runs, or an event."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [name]} for name in _BEGINNINGS]})

    alert: _AlertName | Annotated[tuple[_AlertName, ...], Field(min_length=1)] | None = Field(
        None, description="The alertname, or a list of them."
    )
    manual: Manual | None = Field(None, description="Only people start it.")
    schedule: Schedule | None = Field(None, description="Its times start it: five fields as in crontab.")
    timezone: TimeZone | None = Field(None, description="Of the schedule, such as Europe/Berlin; default: UTC.")
    run: EndedRuns | None = Field(None, description="The end of another playbook's run starts it.")
    event: Identifier | None = Field(None, description="Events of POST /events/NAME start it.")
    matchers: tuple[str, ...] = Field(
        (), max_length=MOST_MATCHERS, description="Alertmanager matchers; all of them must hold."
    )
    when: Expression | None = Field(None, description="A further condition, over the alert.")
    proof: AlertProof | Annotated[tuple[AlertProof, ...], Field(min_length=1)] | None = Field(
        None, description="Proof that the alert must give in addition to its name: one of these is enough."
    )

    @property
    def proofs(self) -> tuple[AlertProof, ...]:
        return (self.proof,) if isinstance(self.proof, AlertProof) else self.proof or ()

    @property
    def alertnames(self) -> tuple[str, ...]:
        return (self.alert,) if isinstance(self.alert, str) else self.alert or ()

    @property
    def zone(self) -> str:
        return self.timezone or "UTC"

    def begins_with(self, playbook: str) -> tuple[str, ...]:
        """Return names of alerts or stand-ins."""
        if self.schedule is not None:
            return (beginnings.schedule_name(playbook),)
        if self.event is not None:
            return (beginnings.event_name(self.event),)
        return tuple(map(beginnings.run_name, self.run.playbook)) if self.run is not None else self.alertnames

    def next_times(self, now: datetime, count: int = 3) -> tuple[datetime, ...]:
        times: list[datetime] = []
        while self.schedule is not None and len(times) < count:
            times.append(cron.next_after(self.schedule, self.zone, times[-1] if times else now))
        return tuple(times)

    @property
    def starter(self) -> str:
        """What starts it, for people; empty for alerts."""
        if self.manual is not None:
            return "people start this playbook"
        if self.schedule is not None:
            return "a schedule starts this playbook"
        if self.run is not None:
            return "the end of a run starts this playbook"
        return "an event starts this playbook" if self.event is not None else ""

    @property
    def sentence(self) -> str:
        """Its beginning, for people."""
        if self.manual is not None:
            return f"started by {' or '.join(self.manual.by) or 'operators'}"
        if self.schedule is not None:
            return f"schedule {self.schedule} ({self.zone})"
        if self.run is not None:
            return f"runs of {_either(self.run.playbook)} that ended as {_either(self.run.status)}"
        return f"event {self.event}" if self.event is not None else ", ".join(self.alertnames)

    @model_validator(mode="after")
    def _is_one_beginning(self) -> Trigger:
        begun = [name for name in _BEGINNINGS if getattr(self, name) is not None]
        if self.manual is None and "manual" in self.model_fields_set:
            raise ValueError("manual is empty; write manual: {}")
        if not begun:
            raise ValueError("'alert' is missing")
        if len(begun) > 1:
            raise ValueError(f"names one beginning: {' or '.join(begun)}, not {'both' if len(begun) == 2 else 'all'}")
        if self.timezone is not None and self.schedule is None:
            raise ValueError("timezone belongs to a schedule; there is none")
        if begun[0] in ("manual", "schedule") and (self.matchers or self.when or self.proof):
            raise ValueError(f"matchers, when and proof are conditions on an alert; {begun[0]} has none")
        if begun[0] != "alert" and self.proof:
            raise ValueError(f"proof is given by alerts; {begun[0]} has none")
        return self


def _either(words: Sequence[str]) -> str:
    return " or ".join(words)
