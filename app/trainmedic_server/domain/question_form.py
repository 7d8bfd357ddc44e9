"""Models of questions to people, and the base of all playbook models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainmedic_core.fields import Duration


class PlaybookModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)


Approver = Annotated[str, Field(min_length=1, max_length=128)]
Approvers = Annotated[tuple[Approver, ...], Field(max_length=100)]
LastResort = Literal["fail", "continue", "reject", "approve"]


class Escalation(PlaybookModel):
    """The next approvers if no one answers in time, and what follows if they do not answer either."""

    by: Annotated[Approvers, Field(min_length=1)]
    to: str | None = Field(None, description="Notification channel; default: all.")
    timeout: Duration | None = Field(None, description="Time to answer; default: the step's timeout.")
    on_timeout: LastResort = "fail"


class AskingForm(PlaybookModel):
    """Common members of steps and mode `approve`."""

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


class Question(AskingForm):
    """A question to people."""


OnTimeout = Literal["fail", "continue", "reject", "approve", "escalate"]
