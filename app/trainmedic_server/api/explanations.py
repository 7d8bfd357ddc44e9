"""``POST /explain``: what the server would do about an alert, and why; it changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from pydantic import Field

from trainmedic_server.api import given_alerts, received_alerts, test_text
from trainmedic_server.api.engine import CatalogPort, EnginePort
from trainmedic_server.api.times import TimeText, time_of
from trainmedic_server.api.view import View
from trainmedic_server.auth.auth import Authenticator, requires
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Controls, Decision
from trainmedic_server.engine.explanation import ExplainedAlert
from trainmedic_server.engine.forecast import StepForecast
from trainmedic_server.http.api_routes import ApiRoutes
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.http.body import BodyReader, parse_json
from trainmedic_server.http.limits import MIB, ServerLimits
from trainmedic_server.http.problems import responses
from trainmedic_server.http.read_turns import ReadTurns
from trainmedic_server.ports.heard_alerts import HeardAlerts
from trainmedic_server.ports.outside import Clock

_BODY_BYTES = MIB


class StepPlanView(View):
    """One step, and what would become of it."""

    phase: str = Field(description="steps, on_success or on_failure.")
    id: str
    what: str
    verdict: StepForecast
    why: str
    params: dict[str, Any] | None = Field(description="Rendered and checked; null where it has none or they depend.")
    undo: str | None


class ExplanationView(View):
    """What one playbook would do about the alert."""

    playbook: str
    source: str
    version: str
    matched: bool = Field(description="Whether it reacts to the alert.")
    why: str = Field(description="Why it does not, or why nothing would begin.")
    mode: Mode | None
    target: str | None
    target_from: list[str] = Field(
        description="What each label says of the node, and who knows it; empty where the target has no node."
    )
    decision: Decision | None = Field(description="null where it does not react, or the alert has resolved.")
    run_id: str | None = Field(description="The run that deals with the alert already, or that it would join.")
    waits_for: str | None = Field(description="The run that holds the target, for which it would wait.")
    guards: list[str] = Field(description="A sentence for each guard, with how far it is used up.")
    steps: list[StepPlanView]


class ExplainedAlertView(View):
    """An alert, and what all playbooks would do about it."""

    alert_name: str
    labels: dict[str, str]
    status: AlertStatus
    starts_at: datetime
    reason: str = Field(description="Why no playbook reacts; empty where one does.")
    acting: list[str] = Field(
        description="The playbooks that would act. Two do so one after the other, each without regard to the other."
    )
    kept_back: str = Field(
        description="Why Alertmanager, as its API said, does not send it, such as `silenced by` an id; empty else."
    )
    told: list[str] = Field(description="The runs that would be told that the alert has resolved.")
    playbooks: list[ExplanationView] = Field(description="Those that name the alertname.")
    suggestion: received_alerts.SuggestionView | None = Field(
        description="What the alert map could rename it to, where no playbook names its alertname; null else."
    )
    original_alert_name: str | None = Field(description=received_alerts.ORIGINAL_NAME)
    original_labels: dict[str, str] | None = Field(description=received_alerts.ORIGINAL_LABELS)


class ServerState(View):
    """What of the server bears on every decision."""

    mode: Mode | None = Field(description="The server's mode; null where there is no server.")
    paused: bool
    paused_by: str | None
    breaker_open: bool
    breaker_reason: str | None


class ExplainView(View):
    """What would be done about the alerts, in their order."""

    at: datetime = Field(description="As of when the alerts' age was judged.")
    server: ServerState | None = Field(description="null where no server was asked.")
    items: list[ExplainedAlertView]
    test: str | None = Field(description="A file of tests for `trainmedic playbook test`, where one was asked for.")


def view(
    explained: Sequence[ExplainedAlert],
    names: received_alerts.ReactingPlaybooks,
    at: datetime,
    controls: Controls | None = None,
    mode: Mode | None = None,
    test: str | None = None,
    kept_back: Sequence[str] = (),
) -> ExplainView:
    """Return the explanations as the API shows them."""
    server = None
    if controls is not None:
        members = ("paused", "paused_by", "breaker_open", "breaker_reason")
        server = ServerState(mode=mode, **{name: getattr(controls, name) for name in members})
    reasons = itertools.chain(kept_back, itertools.repeat(""))
    items = [_alert_view(each, names, why) for each, why in zip(explained, reasons, strict=False)]
    return ExplainView(at=at, server=server, items=items, test=test)


async def explain(
    engine: EnginePort,
    catalog: CatalogPort,
    alerts: Sequence[Alert],
    now: datetime,
    at: datetime | None = None,
    with_test: bool = False,
    kept_back: Sequence[str] = (),
) -> ExplainView:
    """What the server would do about the alerts now. Raises StoreUnavailable."""
    explained = await engine.explain(alerts, at)
    test = test_text.write(await engine.explain_for_a_test(alerts)) if with_test else None
    return view(
        explained, received_alerts.alertnames(catalog), at or now, engine.controls, engine.mode, test, kept_back
    )


def _alert_view(
    explained: ExplainedAlert, names: received_alerts.ReactingPlaybooks, kept_back: str
) -> ExplainedAlertView:
    alert = explained.alert
    suggestion = received_alerts.suggested(alert, names)
    return ExplainedAlertView(
        alert_name=alert.name,
        labels=dict(alert.labels),
        status=alert.status,
        starts_at=alert.starts_at,
        reason=_reason(explained, names, suggestion),
        acting=list(explained.acting),
        kept_back=kept_back,
        told=list(explained.told),
        playbooks=[ExplanationView.model_validate(each) for each in explained.playbooks if each.names_alert],
        suggestion=suggestion,
        original_alert_name=alert.original_name,
        original_labels=None if alert.original is None else dict(alert.original),
    )


def _reason(
    explained: ExplainedAlert,
    names: received_alerts.ReactingPlaybooks,
    suggestion: received_alerts.SuggestionView | None,
) -> str:
    if explained.refused:
        return f"not accepted by the alert map: {explained.refused}"
    if any(each.matched for each in explained.playbooks):
        return ""
    if explained.alert.name not in names:
        return received_alerts.no_playbook(explained.alert.name, names, suggestion)
    return "; ".join(f"{each.playbook}: {each.why}" for each in explained.playbooks if each.names_alert)


def routers(
    engine: EnginePort,
    catalog: CatalogPort,
    alerts: HeardAlerts,
    auth: Authenticator,
    bodies: BodyReader,
    clock: Clock,
    limits: ServerLimits,
    reads: ReadTurns,
) -> tuple[ApiRoutes, ...]:
    """The routes about alerts."""
    return (
        received_alerts.router(alerts, catalog, auth, clock, limits, reads),
        router(engine, catalog, auth, bodies, clock),
    )


def router(
    engine: EnginePort, catalog: CatalogPort, auth: Authenticator, bodies: BodyReader, clock: Clock
) -> ApiRoutes:
    """The route ``POST /explain``."""
    routes = ApiRoutes("alerts")

    @routes.post(
        "/explain",
        summary="What would be done about an alert, and why",
        response_model=ExplainView,
        responses=responses(400, 401, 403, 408, 413, 415, 422, 503),
        dependencies=[Depends(requires(auth, TokenRole.VIEWER))],
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": "An alert, in any form: a webhook's body, one alert, Alertmanager's `GET "
                "/api/v2/alerts` or `amtool alert query -o json`, a run of the history, a heard alert.",
                "content": {"application/json": {"schema": {}, "example": {"labels": {"alertname": "TrainingNaN"}}}},
            }
        },
    )
    async def explained(
        request: Request,
        at: Annotated[
            TimeText | None, Query(description="Judge the alerts' age as of then; all else is as it is now.")
        ] = None,
        test: Annotated[bool, Query(description="Also write a file of tests of it.")] = False,
    ) -> Response:
        """Judge alerts as if they were delivered now, by the playbooks, guards, locks, switches and the topology of
        this moment. Nothing is changed or kept."""
        now = clock.now()
        moment = time_of(at, now) if at else None
        async with bodies.read(request, _BODY_BYTES) as body:
            document = parse_json(body)
            alerts, kept_back = given_alerts.read(document, now), given_alerts.kept_back(document)
        return AsciiJson.of(await explain(engine, catalog, alerts, now, moment, test, kept_back))

    return routes
