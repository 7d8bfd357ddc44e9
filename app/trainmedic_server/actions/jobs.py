"""Commands to a training job. Tests compare the parameters with the SDK's (``trainmedic.job.parameters``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, cast

from pydantic import AwareDatetime, BaseModel, Field, JsonValue, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from trainmedic.wire import envelope
from trainmedic_core.fields import Duration
from trainmedic_core.target import TargetKind
from trainmedic_server.actions.base import ActionParams, Irreversible, refuse_templates
from trainmedic_server.actions.commands import CommandAction
from trainmedic_server.ports.actions import ON_RECORD, Action, Call, Inverse, LeasedEffect, Renewal
from trainmedic_server.ports.outside import final_replies, own_command

_UNSTATED_PAUSE = timedelta(minutes=3)  # lease of a pause whose job states none
_LARGEST_SHOWN = 1e300  # an int of 309 digits has no float
_CHECKPOINT_TIME = timedelta(minutes=10)  # reading or writing the checkpoint of a large model


class _JobAction(CommandAction):
    targets: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})


class JobCheckpoint(Irreversible, _JobAction):
    name: ClassVar[str] = "job.checkpoint"
    summary: ClassVar[str] = "Write a checkpoint now."
    harmful: ClassVar[bool] = False
    leaves_results: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = _CHECKPOINT_TIME


class RollbackParams(ActionParams):
    """At most one of ``before``, ``step`` and ``steps_back``. By default: before the alert began."""

    before: AwareDatetime | None = Field(None, description="The newest complete checkpoint from before this time.")
    step: int | None = Field(None, ge=0, description="The newest complete checkpoint at or before this step.")
    steps_back: int | None = Field(None, ge=1, description="The newest one at least this many steps back.")
    skip_batches: int = Field(
        0, ge=0, le=1_000_000, description="Batches of data to skip after the rollback; at most a million."
    )

    @model_validator(mode="after")
    def _names_one_place(self) -> RollbackParams:
        if sum(value is not None for value in (self.before, self.step, self.steps_back)) > 1:
            raise ValueError("give one of before, step and steps_back")
        return self


class JobRollback(Irreversible, _JobAction):
    name: ClassVar[str] = "job.rollback"
    summary: ClassVar[str] = "Go back to a checkpoint, by default the newest from before the alert began."
    default_timeout: ClassVar[timedelta] = _CHECKPOINT_TIME
    Params: ClassVar[type[BaseModel]] = RollbackParams

    def wire_params(self, call: Call) -> Mapping[str, Any]:
        params = cast(RollbackParams, call.params)
        wire: dict[str, Any] = {"skip_batches": params.skip_batches}
        if params.step is not None:
            wire["step"] = params.step
        elif params.steps_back is not None:
            wire["steps_back"] = params.steps_back
        else:
            wire["before"] = envelope.write_time(params.before or call.alert.starts_at)
        return wire


def _factor(least: float, most: float) -> Any:
    return Field(
        gt=0,
        description="Factor for the current value.",
        json_schema_extra={"minimum": least, "maximum": most},
    )


class FactorParams(ActionParams):
    """Factor with bounds for playbooks, not for stored factors: the undo uses the reciprocal, which may be large."""

    least: ClassVar[float] = 0.001
    most: ClassVar[float] = 1000
    factor: int | float = _factor(least, most)

    @field_validator("factor")
    @classmethod
    def _is_within_bounds(cls, factor: int | float, info: ValidationInfo) -> int | float:
        if info.context is not ON_RECORD and not cls.least <= factor <= cls.most:
            given = f"{factor:g}" if factor < _LARGEST_SHOWN else "a far larger number"
            raise ValueError(f"must be between {cls.least:g} and {cls.most:g}, not {given}")
        return factor


class ScaleLrParams(FactorParams):
    """Repairs lower the rate. A factor above 10 is probably a typo and would ruin most trainings."""

    most: ClassVar[float] = 10
    factor: int | float = _factor(FactorParams.least, most)


class _Scaling(_JobAction):
    Params: ClassVar[type[BaseModel]] = FactorParams

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse(cls.name, {**params.model_dump(), "factor": 1 / cast(FactorParams, params).factor})


class JobScaleLr(_Scaling):
    name: ClassVar[str] = "job.scale_lr"
    summary: ClassVar[str] = "Multiply the learning rate."
    Params: ClassVar[type[BaseModel]] = ScaleLrParams


class ScaleBatchParams(FactorParams):
    """The factor applies to the micro-batch."""

    keep_global_batch: bool = Field(True, description="Compensate by gradient accumulation.")


class JobScaleBatch(_Scaling):
    name: ClassVar[str] = "job.scale_batch"
    summary: ClassVar[str] = "Multiply the micro-batch size, by default keeping the global batch."
    Params: ClassVar[type[BaseModel]] = ScaleBatchParams


class JobAccumulate(_Scaling):
    name: ClassVar[str] = "job.accumulate"
    summary: ClassVar[str] = "Multiply the number of gradient accumulation steps."


class DataloaderWorkersParams(ActionParams):
    """Exactly one of the two."""

    count: int | None = Field(None, ge=0, le=1024, description="Worker processes of each rank's data loader.")
    at_most: int | None = Field(
        None, ge=0, le=1024, description="The same as an upper bound: the number is lowered, never raised."
    )

    @model_validator(mode="after")
    def _says_one_number(self) -> DataloaderWorkersParams:
        if (self.count is None) == (self.at_most is None):
            raise ValueError("give exactly one of count and at_most")
        return self


class JobDataloaderWorkers(_JobAction):
    name: ClassVar[str] = "job.dataloader_workers"
    summary: ClassVar[str] = "Set how many workers load data, or lower them."
    Params: ClassVar[type[BaseModel]] = DataloaderWorkersParams

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        """Return None until the job has reported the previous count."""
        previous = (output or {}).get("previous")
        if isinstance(previous, bool) or not isinstance(previous, int) or not 0 <= previous <= 1024:
            return None
        return Inverse(cls.name, {"count": previous})


class JobEmptyCache(Irreversible, _JobAction):
    name: ClassVar[str] = "job.empty_cache"
    summary: ClassVar[str] = "Return cached GPU memory to the driver."


class PauseParams(ActionParams):
    max: Duration = Field(
        default="1h",
        validate_default=True,
        description="The job resumes by itself after this time, which starts again while a later question of the run "
        "is open.",
    )
    extends: Annotated[
        SkipJsonSchema[str | None], Field(description="Set by the server: the pause that a renewal extends.")
    ] = None

    @model_validator(mode="after")
    def _is_some_time(self) -> PauseParams:
        if not self.max:
            raise ValueError("max is the longest pause; it cannot be 0")
        return self


class JobPause(_JobAction):
    name: ClassVar[str] = "job.pause"
    summary: ClassVar[str] = "Hold the training loop at a step boundary, for a limited time."
    silences: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})
    is_hold: ClassVar[bool] = True
    lease: ClassVar[timedelta] = timedelta(days=30)  # the longest pause that jobs accept
    Params: ClassVar[type[BaseModel]] = PauseParams

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse(JobResume.name, {})

    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        if "extends" in raw:
            raise ValueError("extends is set by the server")

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        seconds = output.get("max_seconds")
        if not isinstance(seconds, int | float) or not seconds > 0:
            return _UNSTATED_PAUSE
        return timedelta(seconds=min(seconds, cls.lease.total_seconds()))

    async def renew(self, effects: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        return await asyncio.gather(*(self._extend(pause, until) for pause in effects))

    async def _extend(self, pause: LeasedEffect, until: datetime) -> Renewal:
        job, params = pause.target.job or "", {**pause.params, "extends": pause.command_id}
        command = own_command(
            self.name, pause.target, params, "a question is open", self._clock.now(), until, pause.run_id
        )
        finals = await final_replies(self._bus, command)
        if not finals:
            return Renewal(pause, job, "unanswered", f"job {job} did not answer")
        refused = next((reply for reply in finals if reply.status != envelope.APPLIED), None)
        if refused is None:
            return Renewal(pause, job, "renewed")
        why = f"job {job} answered {refused.status}: {refused.output.get('reason', 'no reason given')}"
        return Renewal(pause, job, "refused", why)


class JobResume(Irreversible, _JobAction):
    name: ClassVar[str] = "job.resume"
    summary: ClassVar[str] = "End a pause."
    gives_back: ClassVar[bool] = True


class StopParams(ActionParams):
    checkpoint: bool = Field(True, description="Write a checkpoint first.")


class JobStop(Irreversible, _JobAction):
    name: ClassVar[str] = "job.stop"
    summary: ClassVar[str] = "Stop the training loop at a step boundary, by default after a checkpoint."
    silences: ClassVar[frozenset[TargetKind]] = frozenset({TargetKind.JOB})
    default_timeout: ClassVar[timedelta] = _CHECKPOINT_TIME
    Params: ClassVar[type[BaseModel]] = StopParams


class JobCommandParams(ActionParams):
    name: Annotated[str, Field(max_length=100, pattern=r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+$")] = Field(
        description="Name under which the training loop registered a handler, such as acme.skip_shard. Not a template."
    )
    with_: dict[str, JsonValue] = Field(default_factory=dict, alias="with", description="The command's parameters.")

    @model_validator(mode="after")
    def _is_one_of_the_jobs_own(self) -> JobCommandParams:
        prefix = self.name.partition(".")[0]
        if prefix in _OWN_PREFIXES:
            raise ValueError(
                f"{self.name}: only actions begin with {prefix}.; write action: NAME, or give the command another name"
            )
        return self


_OWN_PREFIXES = ("job", "launcher", "gpu", "disk", "node")  # of actions that are commands themselves


class JobOwnCommand(Irreversible, _JobAction):
    name: ClassVar[str] = "job.command"
    summary: ClassVar[str] = "Send a command of the job's own, for which its training loop has a handler."
    Params: ClassVar[type[BaseModel]] = JobCommandParams

    def wire_action(self, call: Call) -> str:
        return cast(JobCommandParams, call.params).name

    def wire_params(self, call: Call) -> Mapping[str, Any]:
        return cast(JobCommandParams, call.params).with_

    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        refuse_templates(raw, "name")


ACTIONS: tuple[type[Action], ...] = (
    JobCheckpoint,
    JobRollback,
    JobScaleLr,
    JobScaleBatch,
    JobAccumulate,
    JobDataloaderWorkers,
    JobEmptyCache,
    JobPause,
    JobResume,
    JobStop,
    JobOwnCommand,
)
