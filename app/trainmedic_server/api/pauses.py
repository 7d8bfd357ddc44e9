"""Routes for pauses and a playbook's temporary mode."""

from __future__ import annotations

import difflib
import fnmatch
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Depends, Request
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from trainmedic_core import duration
from trainmedic_core.fields import Duration
from trainmedic_server.api.view import ApiModel, View
from trainmedic_server.auth.auth import Principal
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.pause import EVERYTHING, OperatorPause, PauseOrder, Scope
from trainmedic_server.domain.run import Controls
from trainmedic_server.engine.service import Engine
from trainmedic_server.errors import NotFound, PayloadError
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts

_LONGEST = timedelta(days=366)  # of `for` and `every`
_CLOCK_TOLERANCE = timedelta(minutes=5)  # accepted age of a start, as a client's clock may be slow
# Latest end of a pause: the engine adds the length to a slightly later time, which must not overflow.
_LATEST = datetime(9999, 1, 1, tzinfo=UTC)
_TOO_LATE = "is too late: the pause has to end before the year 9999"


def _checked_time(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be a time, such as 2026-01-31T12:00:00Z")
    try:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a time, such as 2026-01-31T12:00:00Z") from None
    raise ValueError("must have a zone, such as the Z of 2026-01-31T12:00:00Z")


def _checked_length(value: timedelta) -> timedelta:
    if not timedelta(0) < value <= _LONGEST:
        raise ValueError("must be longer than 0s, and a year at most")
    return value


Moment = Annotated[datetime, BeforeValidator(_checked_time), WithJsonSchema({"type": "string", "format": "date-time"})]
Span = Annotated[Duration, AfterValidator(_checked_length)]
Pattern = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]*$")]
Note = Annotated[str, Field(max_length=500, pattern=r"^[^\x00]*$")]


class _ScopeBody(ApiModel):
    """Affected runs: those for which all given conditions hold."""

    model_config = ConfigDict(extra="forbid")

    playbook: Pattern | None = Field(None, description="Shell pattern for names of playbooks.")
    node: Pattern | None = Field(None, description="Shell pattern; also matches runs on jobs that use such a node.")
    job: Pattern | None = Field(None, description="Shell pattern; also matches runs on nodes and GPUs of such a job.")
    labels: dict[Pattern, str] = Field(default_factory=dict, max_length=20, description="Labels of the run's alert.")

    @property
    def scope(self) -> Scope:
        return Scope(self.playbook, self.node, self.job, self.labels)


class PauseBody(_ScopeBody):
    """Scope, time and reason of a pause. By default everything, until `/resume`."""

    model_config = ConfigDict(
        extra="forbid",
        validate_by_name=False,
        json_schema_extra={"examples": [{"node": "node-7", "for": "2h", "note": "new fans"}]},
    )

    length: Span | None = Field(None, alias="for", description="Duration; by default until `/resume`.")
    until: Moment | None = Field(None, description="End, in place of `for`.")
    note: Note = ""
    starts: Moment | None = Field(None, description="Start; by default now.")
    every: Span | None = Field(None, description="Repeat with this distance between two starts.")

    @model_validator(mode="after")
    def _makes_sense(self) -> PauseBody:
        if self.length is not None and self.until is not None:
            raise ValueError("give 'for' or 'until', not both")
        if self.every is not None and (self.length is None or self.length >= self.every):
            raise ValueError("'every' needs a 'for' that is shorter")
        return self


class ModeBody(ApiModel):
    """Temporary mode of a playbook's runs."""

    model_config = ConfigDict(
        extra="forbid",
        validate_by_name=False,
        json_schema_extra={"examples": [{"mode": "observe", "for": "1d", "note": "it drained twice tonight"}]},
    )

    mode: Literal["observe", "as_written"] = Field(description="`as_written` ends an earlier `observe`.")
    length: Span | None = Field(None, alias="for", description="Duration; by default until someone ends it.")
    until: Moment | None = Field(None, description="End, in place of `for`.")
    note: Note = ""

    @model_validator(mode="after")
    def _has_one_end(self) -> ModeBody:
        if self.length is not None and self.until is not None:
            raise ValueError("give 'for' or 'until', not both")
        return self


class ResumeBody(_ScopeBody):
    """Pauses to end: that `id`, or exactly this scope. Without both, every active one, unless `breaker` is set."""

    # Earlier servers ignored unknown members, so clients may send some.
    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [{"breaker": True}]})

    breaker: bool = Field(False, strict=True, description="Close the breaker, which restarts its count.")
    id: Annotated[str, Field(pattern=r"^[0-9A-Za-z]{1,36}$")] | None = Field(None, description="End only this pause.")

    @property
    def names_pauses(self) -> bool:
        return self.id is not None or self.scope != EVERYTHING


class PauseView(View):
    id: str
    by: str
    at: datetime = Field(description="When it was created.")
    scope: str = Field(description="Affected runs, for people.", examples=["node node-7", "everything"])
    playbook: str | None
    node: str | None
    job: str | None
    labels: dict[str, str]
    starts_at: datetime = Field(description="Start; of a recurring one, of its present or next window.")
    until: datetime | None = Field(description="End of it or of that window; null if someone has to end it.")
    every: str | None = Field(description="Distance between two starts of a recurring pause.")
    note: str
    observe: bool = Field(description="Whether its runs are only recorded instead of paused.")
    in_force: bool = Field(description="Whether it is active now.")


class ControlsView(View):
    paused: bool = Field(description="Whether everything is paused; `pauses` also lists partial ones.")
    paused_by: str | None
    paused_at: datetime | None
    breaker_open: bool
    breaker_opened_at: datetime | None
    breaker_reason: str | None
    breaker_closed_at: datetime | None = Field(
        description="When someone last closed it: only later actions of runs count."
    )
    pauses: list[PauseView]


class PausedView(ControlsView):
    pause: PauseView
    warning: str = Field(description="Possible error in the command; otherwise empty.")


class PauseList(View):
    items: list[PauseView]


def pause_views(controls: Controls, now: datetime) -> list[PauseView]:
    return [_pause_view(pause, now) for pause in controls.pauses if not pause.is_over(now)]


def router(engine: Engine, catalog: Library, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)
    now = parts.clock.now

    @routes.act("/pause", PauseBody, 404, 409, summary="Pause")
    async def pause(request: Request, actor: Principal = Depends(routes.operator)) -> PausedView:
        """The kill switch: nothing new starts until `/resume`; undos still run. A body limits it to some runs, a
        duration or a later time.
        """
        body = await parts.bodies.read_model(request, PauseBody)
        controls, made = await engine.pause(actor.name, _pause_order(body, now()))
        at = now()
        warning = _warning(made.scope, catalog)
        return PausedView.of(controls, pauses=pause_views(controls, at), pause=_pause_view(made, at), warning=warning)

    @routes.act("/resume", ResumeBody, 404, 409, summary="Resume")
    async def resume(request: Request, actor: Principal = Depends(routes.operator)) -> ControlsView:
        """End one pause or all, or close the breaker. Alerts blocked in the pause are not replayed."""
        body = await parts.bodies.read_model(request, ResumeBody)
        if body.names_pauses or not body.breaker:
            controls = await engine.resume(actor.name, body.id, body.scope)
        if body.breaker:
            controls = await engine.close_breaker(actor.name)
        return ControlsView.of(controls, pauses=pause_views(controls, now()))

    @routes.read("/pauses", summary="Present and future pauses")
    async def pauses() -> PauseList:
        return PauseList(items=pause_views(engine.controls, now()))

    @routes.act("/playbooks/{name}/mode", ModeBody, 404, 409, summary="Limit a playbook to observing for a while")
    async def mode(request: Request, name: str, actor: Principal = Depends(routes.operator)) -> ControlsView:
        """New runs of the playbook are only recorded, as in mode `observe`; open ones continue."""
        body = await parts.bodies.read_model(request, ModeBody)
        controls = await _set_mode(engine, catalog, name, body, actor.name, now())
        return ControlsView.of(controls, pauses=pause_views(controls, now()))

    return routes


async def _set_mode(engine: Engine, catalog: Library, name: str, body: ModeBody, actor: str, now: datetime) -> Controls:
    limits = [pause for pause in engine.controls.pauses if pause.observe and pause.scope.playbook == name]
    if body.mode == "as_written":
        if not limits:
            raise NotFound(f"The playbook {name} is not limited to observing by an operator.")
        for limit in limits:
            await engine.resume(actor, limit.id)
        return engine.controls
    if catalog.get(name) is None:
        raise NotFound("No playbook of that name is loaded. GET /playbooks lists loaded playbooks and failed files.")
    wanted = PauseOrder(Scope(playbook=name), body.note, length=_length(body, now), observe=True)
    controls, _ = await engine.pause(actor, wanted)
    return controls


def _length(body: PauseBody | ModeBody, begins: datetime) -> timedelta | None:
    if body.until is None:
        return body.length
    if body.until <= begins:
        raise PayloadError.at([("until", "must be later than the start")])
    if body.until >= _LATEST:
        raise PayloadError.at([("until", _TOO_LATE)])
    return body.until - begins


def _pause_order(body: PauseBody, now: datetime) -> PauseOrder:
    if body.starts is not None and body.starts < now - _CLOCK_TOLERANCE:
        raise PayloadError.at([("starts", "is in the past; omit it for a pause that starts now")])
    begins = max(body.starts or now, now)
    length = _length(body, begins)
    if (length or timedelta(0)) + (body.every or timedelta(0)) > _LATEST - begins:
        raise PayloadError.at([("starts", _TOO_LATE)])
    return PauseOrder(body.scope, body.note.strip(), body.starts, length, body.every)


def _warning(scope: Scope, catalog: Library) -> str:
    """Return a warning if no loaded playbook matches the scope's pattern, else ""."""
    pattern, names = scope.playbook, [compiled.definition.name for compiled in catalog.all()]
    if pattern is None or any(fnmatch.fnmatchcase(name, pattern) for name in names):
        return ""
    near = difflib.get_close_matches(pattern, names, 1)
    return f"no loaded playbook is named {pattern!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _pause_view(pause: OperatorPause, now: datetime) -> PauseView:
    starts_at, until = pause.window(now) or (pause.starts_at, pause.ends_at)
    return PauseView.of(
        pause,
        scope=str(pause.scope),
        playbook=pause.scope.playbook,
        node=pause.scope.node,
        job=pause.scope.job,
        labels=pause.scope.labels,
        starts_at=starts_at,
        until=until,
        every=duration.write(pause.every) if pause.every else None,
        in_force=pause.is_in_force(now),
    )
