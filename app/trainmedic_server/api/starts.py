"""The routes by which a person has a playbook run: ``POST /runs`` and ``POST /runs/{id}/retry``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from pydantic import ConfigDict, Field

from trainmedic_core.target import Target
from trainmedic_server.api import run_ids, views
from trainmedic_server.api.approvals import StepAheadView
from trainmedic_server.api.engine import EnginePort
from trainmedic_server.api.run_ids import RunId
from trainmedic_server.api.view import ApiModel, View
from trainmedic_server.auth.auth import Authenticator, Principal, requires
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.run import Decision
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import Started, StartOrder
from trainmedic_server.errors import PayloadError
from trainmedic_server.http.api_routes import ApiRoutes
from trainmedic_server.http.bodies import body_schema, read_body
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.problems import responses
from trainmedic_server.ports.present import Present

_REFUSALS = responses(400, 401, 403, 404, 408, 409, 413, 415, 422, 503)

Text = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]*$")]
Key = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=200,
        pattern=r"^[^\x00]*$",
        description="A name of the client's own for its request: repeated with the same one it starts nothing again.",
    ),
]


class RetryBody(ApiModel):
    """Why; recorded with the run."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"note": "the agent is back"}]})

    note: str = Field("", max_length=2000, pattern=r"^[^\x00]*$")
    key: Key = None


class StartBody(RetryBody):
    """Which playbook is to run on what."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"playbook": "training-loss-spike", "target": "job:llm-1", "dry_run": True}]},
    )

    playbook: Text
    target: Text = Field(description="Such as job:llm-1, node:node-1, gpu:node-1/0 or cluster.")
    labels: dict[Text, str] = Field(
        default_factory=dict, max_length=100, description="The alert must have them; or they stand in its place."
    )
    dry_run: bool = Field(False, description="Do and record nothing, but say what would be done, or what bars it.")


class StartedView(View):
    """What became of a start by hand, or would."""

    run: views.HistoryItem | None = Field(description="The run, or the record of why none started; null in a dry run.")
    playbook: str
    target: str
    decision: Decision = Field(description="started, observe_only, or what bars it.")
    why: str = Field(description="For people: what bars it.")
    mode: Mode
    alert_name: str = Field(description="The alert that it is tied to; StartedByHand where none fires.")
    waits_for: str | None = Field(description="The run that holds its target, for which it waits first.")
    repeated: bool = Field(description="Whether an earlier request with the same key has started it.")
    steps: list[StepAheadView] = Field(description="What it does, or would, rendered.")


def router(engine: EnginePort, present: Present, auth: Authenticator, bodies: BodyReader) -> ApiRoutes:
    """The routes of this module."""
    operator = requires(auth, TokenRole.OPERATOR)
    routes = ApiRoutes("operations")

    @routes.post(
        "/runs",
        summary="Have a playbook run on a target",
        response_model=StartedView,
        responses=_REFUSALS,
        openapi_extra=body_schema(StartBody),
    )
    async def start(request: Request, actor: Principal = Depends(operator)) -> StartedView:
        """By the same guards, locks and breaker as for an alert; the decision is recorded with who wanted it."""
        body = await read_body(bodies, request, StartBody)
        try:
            order = StartOrder(body.playbook, Target.of_key(body.target), body.labels, body.dry_run)
        except ValueError as error:
            raise PayloadError.at([("target", str(error))]) from None
        by = ByHand(actor.name, body.note.strip(), key=body.key)
        return _view(await engine.start_run(order, by), is_dry=body.dry_run)

    @routes.post(
        "/runs/{run_id}/retry",
        summary="Try again what ended without success",
        response_model=StartedView,
        responses=_REFUSALS,
        openapi_extra=body_schema(RetryBody),
    )
    async def retry(request: Request, run_id: RunId, actor: Principal = Depends(operator)) -> StartedView:
        """Start another run for the alert of this one, which still fires, with the playbook as it is now."""
        body = await read_body(bodies, request, RetryBody)
        whole_id = await run_ids.whole(present, run_id)
        by = ByHand(actor.name, body.note.strip(), repeats=whole_id, key=body.key)
        return _view(await engine.retry(whole_id, by), is_dry=False)

    return routes


def _view(started: Started, *, is_dry: bool) -> StartedView:
    run = started.run
    is_barred = run.decision not in (Decision.STARTED, Decision.OBSERVE_ONLY)
    return StartedView(
        run=None if is_dry and not started.is_repeated else views.item(run),
        playbook=run.playbook,
        target=run.target_key,
        decision=run.decision,
        why=run.message if is_barred else "",
        mode=run.mode,
        alert_name=run.alert_name,
        waits_for=started.waits_for,
        repeated=started.is_repeated,
        steps=[StepAheadView.model_validate(step) for step in started.steps],
    )
