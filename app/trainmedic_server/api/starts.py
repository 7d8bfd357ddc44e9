"""Manual starts: ``POST /runs`` and ``POST /runs/{id}/retry``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from pydantic import ConfigDict, Field

from trainmedic_core.target import Target
from trainmedic_server.api import run_ids, views
from trainmedic_server.api.approvals import StepAheadView
from trainmedic_server.api.run_ids import RunId
from trainmedic_server.api.view import ApiModel, View
from trainmedic_server.auth.auth import Principal
from trainmedic_server.domain.inputs import MOST_INPUTS, Value
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.run import Decision
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import Started, StartOrder
from trainmedic_server.engine.service import Engine
from trainmedic_server.errors import PayloadError
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.ports.present import Present

Text = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]*$")]
Key = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=200,
        pattern=r"^[^\x00]*$",
        description="Idempotency key. Repeating a request with it starts no second run.",
    ),
]


class RetryBody(ApiModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"note": "the agent is back"}]})

    note: str = Field("", max_length=2000, pattern=r"^[^\x00]*$")
    key: Key = None


class StartBody(RetryBody):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"playbook": "training-loss-spike", "target": "job:llm-1", "dry_run": True}]},
    )

    playbook: Text
    target: Text | None = Field(
        None,
        description="Such as job:llm-1, node:node-1, gpu:node-1/0 or cluster. null if the playbook derives it.",
    )
    inputs: dict[Text, Value | None] = Field(default_factory=dict, max_length=MOST_INPUTS, description="By name.")
    labels: dict[Text, Annotated[str, Field(pattern=r"^[^\x00]*$")]] = Field(
        default_factory=dict, max_length=100, description="Labels that the alert must have, or that replace an alert's."
    )
    dry_run: bool = Field(False, description="Do and record nothing; return what would be done or what prevents it.")


class StartedView(View):
    run: views.HistoryItem | None = Field(description="The run, or the record of why none started; null in a dry run.")
    playbook: str
    target: str
    decision: Decision = Field(description="started, observe_only, or the obstacle.")
    why: str = Field(description="The obstacle, for people.")
    mode: Mode
    alert_name: str = Field(description="The related alert; StartedByHand if none is firing.")
    waits_for: str | None = Field(description="The run whose lock it waits for.")
    repeated: bool = Field(description="Whether an earlier request with the same key started it.")
    steps: list[StepAheadView] = Field(description="Its steps, rendered.")


def router(engine: Engine, present: Present, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)

    @routes.act("/runs", StartBody, 404, 409, summary="Start a playbook manually")
    async def start(request: Request, actor: Principal = Depends(routes.operator)) -> StartedView:
        """With the same guards, locks and breaker as for an alert. The decision is recorded with its author."""
        body = await parts.bodies.read_model(request, StartBody)
        try:
            target = Target.of_key(body.target) if body.target is not None else None
        except ValueError as error:
            raise PayloadError.at([("target", str(error))]) from None
        order = StartOrder(body.playbook, target, body.labels, body.dry_run, body.inputs)
        by = ByHand(actor.name, body.note.strip(), key=body.key, groups=actor.groups)
        return _view(await engine.start_run(order, by), is_dry=body.dry_run)

    @routes.act("/runs/{run_id}/retry", RetryBody, 404, 409, summary="Retry an unsuccessful run")
    async def retry(request: Request, run_id: RunId, actor: Principal = Depends(routes.operator)) -> StartedView:
        """The alert must still fire. The present playbook applies."""
        body = await parts.bodies.read_model(request, RetryBody)
        whole_id = await run_ids.whole(present, run_id)
        by = ByHand(actor.name, body.note.strip(), repeats=whole_id, key=body.key, groups=actor.groups)
        return _view(await engine.retry(whole_id, by), is_dry=False)

    return routes


def _view(started: Started, *, is_dry: bool) -> StartedView:
    run = started.run
    is_barred = run.decision not in (Decision.STARTED, Decision.OBSERVE_ONLY)
    return StartedView.of(
        run,
        run=None if is_dry and not started.is_repeated else views.item(run),
        target=run.target_key,
        why=run.message if is_barred else "",
        waits_for=started.waits_for,
        repeated=started.is_repeated,
        steps=started.steps,
    )
