"""Routes of operator commands for runs, and of playbooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, Query, Request
from pydantic import ConfigDict, Field

from trainmedic.wire.notice import NAME
from trainmedic_core.target import TargetKind
from trainmedic_server.api import approvals, pauses, run_ids, starts, views
from trainmedic_server.api.run_ids import RunId
from trainmedic_server.api.view import ApiModel
from trainmedic_server.auth.auth import Principal
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.inputs import InputType, Value
from trainmedic_server.domain.job_life import LifeState
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import OrderKind
from trainmedic_server.engine.job_watch import JobWatch
from trainmedic_server.engine.service import Engine
from trainmedic_server.errors import NotFound
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.live.now import NowApi
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.present import Present
from trainmedic_server.ports.tallies import PlaybookTally
from trainmedic_server.reports import repair_outcomes
from trainmedic_server.reports.compiling import ReportCompiler

RecentCounts: TypeAlias = Callable[[], Awaitable[Mapping[str, PlaybookTally]]]  # runs of 30 days, by playbook

_ORDERS = {
    OrderKind.APPROVE: "Let a waiting run continue",
    OrderKind.REJECT: "Reject a waiting run's question, and end the run",
    OrderKind.CANCEL: "End a run before its next step",
    OrderKind.UNDO: "End a run and revert all that it did",
}


class OrderBody(ApiModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"note": "the fan was replaced"}]})

    note: str = Field("", max_length=2000, pattern=r"^[^\x00]*$")


class EndingBody(OrderBody):
    """Note, and whether to revert the run's changes at once."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"note": "we look at it ourselves", "undo": True}]})

    undo: bool = Field(
        False,
        description="Revert now all changes of the run that can be reverted. Without it, `undo: on_failure` changes "
        "are reverted at once, and the others when the alert resolves.",
    )


class CloseBody(ApiModel):
    """Why no undo is needed any more."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"note": "the node is gone, and the card with it"}]})

    note: str = Field(min_length=1, max_length=1000, pattern=r"^[^\x00]*\S[^\x00]*$")


class EndBody(ApiModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"note": "ended by scancel, its node was needed"}]})

    note: str = Field(min_length=1, max_length=500, pattern=r"^[^\x00]*\S[^\x00]*$")


class JobLifeView(ApiModel):
    model_config = ConfigDict(from_attributes=True)

    name: str
    state: LifeState
    since: datetime
    reason: str


Counted = Annotated[bool, Query(description="false: omit its runs, which take a moment in a long history.")]


class InputView(ApiModel):
    type: InputType
    default: Value | None = Field(description="null if there is none.")
    required: bool


class ManualView(ApiModel):
    by: list[str] = Field(description="Who may start it; empty for any operator.")
    inputs: dict[str, InputView]


class PlaybookSummary(ApiModel):
    name: str
    summary: str
    mode: Mode
    alerts: list[str] = Field(description="Alertnames that it reacts to.")
    manual: ManualView | None = Field(None, description="How people start it, if only they do; otherwise null.")
    begins: str = Field("", description="Beginning of its runs, for people: alertnames, a schedule, people.")
    next_times: list[datetime] = Field(default_factory=list, description="Next times of its schedule.")
    proof: list[str] = Field(
        default_factory=list,
        description="Proof that an alert must give in addition to its name: one of these is enough.",
    )
    target: TargetKind = Field(description="Kind of target of its runs.")
    source: str = Field(description="Its file.")
    version: str = Field(description="Hash of its text.")
    runs: dict[str, int] = Field(
        description="Its runs of the last 30 days, and decisions not to start one, by status.",
        examples=[{"succeeded": 12}],
    )
    last_30_days: repair_outcomes.RepairTotal = Field(description="Benefit of these runs; up to 15 minutes old.")


class PlaybookView(PlaybookSummary):
    text: str


class LoadProblemView(ApiModel):
    model_config = ConfigDict(from_attributes=True)

    file: str
    line: int | None
    column: int | None
    message: str


class PlaybookList(ApiModel):
    items: list[PlaybookSummary]
    errors: list[LoadProblemView]


def routers(
    engine: Engine,
    lives: JobWatch,
    catalog: Library,
    compiler: ReportCompiler,
    now_api: NowApi,
    parts: RouteParts,
    alert_map: AlertMapLibrary,
) -> tuple[ApiRoutes, ...]:
    return (
        pauses.router(engine, catalog, parts),
        starts.router(engine, now_api.present, parts),
        approvals.router(compiler.history, parts, now_api.external_url),
        _run_routes(engine, now_api.present, parts),
        _playbook_routes(catalog, compiler.recent_counts, parts, alert_map),
        _job_routes(lives, parts),
    )


def _job_routes(lives: JobWatch, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)

    @routes.act("/jobs/{job:path}/end", EndBody, 404, 409, summary="Mark a gone job as ended intentionally")
    async def end(request: Request, job: str, actor: Principal = Depends(routes.operator)) -> JobLifeView:
        """The job no longer counts as gone."""
        body = await parts.bodies.read_model(request, EndBody)
        return JobLifeView.model_validate(await lives.end(job, actor.name, body.note.strip()))

    return routes


def _run_routes(engine: Engine, present: Present, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)

    def add_route(kind: OrderKind, summary: str, model: type[OrderBody | CloseBody]) -> None:
        @routes.act(f"/runs/{{run_id}}/{kind}", model, 404, 409, name=kind.value, summary=summary)
        async def order(
            request: Request, run_id: RunId, actor: Principal = Depends(routes.operator)
        ) -> views.HistoryItem:
            body = await parts.bodies.read_model(request, model)
            whole_id = await run_ids.whole(present, run_id)
            undo = isinstance(body, EndingBody) and body.undo
            return views.item(await engine.order(whole_id, kind, actor.name, body.note, actor.groups, undo=undo))

    for kind, summary in _ORDERS.items():
        add_route(kind, summary, EndingBody if kind in (OrderKind.REJECT, OrderKind.CANCEL) else OrderBody)
    add_route(OrderKind.CLOSE_UNDO, "Drop a run's pending undo", CloseBody)

    return routes


def _playbook_routes(
    catalog: Library, recent_counts: RecentCounts, parts: RouteParts, alert_map: AlertMapLibrary
) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)
    now = parts.clock.now

    @routes.read("/playbooks", summary="Loaded playbooks")
    async def playbooks(counted: Counted = True) -> PlaybookList:
        """Files that were not loaded are included with their errors."""
        async with parts.reads.take():
            counts = await recent_counts() if counted else {}
        problems = (*catalog.problems, *alert_map.problems)
        return PlaybookList(
            items=[PlaybookSummary(**_summary(playbook, counts, now())) for playbook in catalog.all()],
            errors=[LoadProblemView.model_validate(problem) for problem in problems],
        )

    @routes.read("/playbooks/{name}", 404, summary="One playbook")
    async def playbook(name: str, counted: Counted = True) -> PlaybookView:
        playbook = catalog.get(name)
        if playbook is None:
            raise NotFound(
                "No playbook of that name is loaded. GET /playbooks lists loaded playbooks and failed files."
            )
        async with parts.reads.take():
            counts = await recent_counts() if counted else {}
        return PlaybookView(**_summary(playbook, counts, now()), text=playbook.text)

    return routes


def checked_job(text: str) -> str:  # raises NotFound
    if not NAME.match(text):
        raise NotFound("No job can have that name.")
    return text


def _summary(playbook: CompiledPlaybook, counts: Mapping[str, PlaybookTally], now: datetime) -> dict[str, Any]:
    spec = playbook.definition
    tally = counts.get(spec.name, PlaybookTally())
    return {
        "name": spec.name,
        "summary": spec.summary,
        "mode": spec.mode,
        "alerts": list(spec.on.alertnames),
        "manual": None if spec.on.manual is None else spec.on.manual.model_dump(mode="json"),
        "begins": spec.on.sentence,
        "next_times": spec.on.next_times(now),
        "proof": [str(each) for each in spec.on.proofs],
        "target": spec.target_kind,
        "source": playbook.source,
        "version": playbook.version,
        "runs": {status.value: count for status, count in sorted(tally.statuses.items())},
        "last_30_days": repair_outcomes.repair_total(spec.name, tally),
    }
