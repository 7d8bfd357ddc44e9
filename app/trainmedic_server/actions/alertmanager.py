"""Actions on silences, found again by the command's ID in their comment."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, cast

from pydantic import BaseModel, Field, model_validator

from trainmedic_core.fields import Duration
from trainmedic_server.actions.base import ActionParams, BasicAction, Irreversible
from trainmedic_server.domain.value_types import TEXT, TEXTS, Shape
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Action, Call, Inverse
from trainmedic_server.ports.outside import AlertSource

COMMENT_LIMIT = 1000  # characters


class SilenceParams(ActionParams):
    duration: Duration = Field(description="Duration of the silence, from the start of the step.", gt=timedelta(0))
    comment: str = Field(
        "Silenced by Trainmedic", description="The silence's comment; the id of the command is added to it."
    )
    labels: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None,
        description="The labels whose values an alert must share to be silenced. By default all of this alert's "
        "labels, which silences it alone.",
    )


class ExpireParams(ActionParams):
    silence_id: str | None = Field(None, pattern=r"^[0-9A-Za-z-]{1,64}$", description="The silence's id.")
    comment: str | None = Field(None, description="Used by an undo without the silence's id: its comment.")

    @model_validator(mode="after")
    def _names_one(self) -> ExpireParams:
        if self.silence_id is None and self.comment is None:
            raise ValueError("silence_id is missing")
        return self


class _AlertmanagerAction(BasicAction):
    changes_elsewhere: ClassVar[bool] = True
    leaves_disks: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = timedelta(seconds=10)

    @property
    def alertmanager(self) -> AlertSource:
        if self.services.alertmanager is None:
            raise PermanentFailure("the Alertmanager's URL is not configured")
        return self.services.alertmanager


class SilenceAlert(_AlertmanagerAction):
    name: ClassVar[str] = "alertmanager.silence"
    summary: ClassVar[str] = "Silence this alert in the Alertmanager for a while; undo ends the silence."
    Params: ClassVar[type[BaseModel]] = SilenceParams
    outputs: ClassVar[Mapping[str, Shape]] = {"silence_id": TEXT, "ends_at": TEXT, "matchers": TEXTS}

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(SilenceParams, call.params)
        alertmanager = self.alertmanager
        # Alertmanager knows the labels that it sent, not those after the alert map.
        matchers = _matchers(call.alert.sent_labels, params.labels)
        # Count from the first attempt, so that resuming does not extend the silence.
        ends_at = call.issued_at + params.duration
        if ends_at <= self.services.clock.now():
            raise PermanentFailure("the silence would have ended already")
        try:
            silence_id = await alertmanager.silence(matchers, ends_at, _comment(params.comment, call.command_id))
        except TemporaryFailure as failure:
            if call.resumed:  # The failure covers only this attempt.
                raise OutcomeUnknown(f"it may have been created before; now: {failure}", failure.output) from failure
            raise
        return {"silence_id": silence_id, "ends_at": ends_at.isoformat(), "matchers": matchers}

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        if output is not None and isinstance(output.get("silence_id"), str):
            return Inverse(ExpireSilence.name, {"silence_id": output["silence_id"]})
        return Inverse(ExpireSilence.name, {"comment": cast(SilenceParams, params).comment})


class ExpireSilence(Irreversible, _AlertmanagerAction):
    name: ClassVar[str] = "alertmanager.expire_silence"
    summary: ClassVar[str] = "End a silence in the Alertmanager."
    gives_back: ClassVar[bool] = True
    Params: ClassVar[type[BaseModel]] = ExpireParams
    outputs: ClassVar[Mapping[str, Shape]] = {"silence_id": TEXT}

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(ExpireParams, call.params)
        alertmanager = self.alertmanager
        silence_id = params.silence_id
        if silence_id is None:
            if call.undo_of is None:
                raise PermanentFailure("silence_id is missing; only an undo can find a silence by its comment")
            silence_id = await alertmanager.find_silence(_comment(params.comment or "", call.undo_of))
        if silence_id is None:
            return {"silence_id": None}
        await alertmanager.expire_silence(silence_id)
        return {"silence_id": silence_id}


def _comment(comment: str, command_id: str) -> str:
    return f"{comment[:COMMENT_LIMIT]} [{command_id}]"


def _matchers(labels: Mapping[str, str], chosen: tuple[str, ...] | None) -> dict[str, str]:
    if chosen is None:
        return dict(labels)
    missing = [name for name in chosen if not labels.get(name)]
    if missing:
        # Without it the silence would cover more alerts than intended.
        raise PermanentFailure(f"the alert has no label {', '.join(missing)}")
    return {name: labels[name] for name in chosen}


ACTIONS: tuple[type[Action], ...] = (SilenceAlert, ExpireSilence)
