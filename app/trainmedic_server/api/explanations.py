"""``POST /explain``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from pydantic import Field

from trainmedic_server.api import alert_list, given_alerts, test_text
from trainmedic_server.api.times import TimeText, time_of
from trainmedic_server.api.view import View
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.alert import AlertStatus
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Controls, Decision
from trainmedic_server.engine.explanation import ExplainedAlert
from trainmedic_server.engine.forecast import StepForecast
from trainmedic_server.engine.service import Engine
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.http.body import parse_json
from trainmedic_server.http.limits import MIB
from trainmedic_server.http.problems import responses

_BODY_BYTES = MIB


class StepPlanView(View):
    phase: str = Field(description="steps, check, on_success or on_failure.")
    id: str
    what: str
    verdict: StepForecast
    why: str
    params: dict[str, Any] | None = Field(
        description="Rendered and checked; null if it has none or they depend on the run."
    )
    undo: str | None


class ExplanationView(View):
    playbook: str
    source: str
    version: str
    matched: bool = Field(description="Whether it reacts to the alert.")
    why: str = Field(description="Why it does not react, or why nothing would start.")
    mode: Mode | None
    target: str | None
    target_from: list[str] = Field(
        description="What each label states about the node, and who knows it; empty if the target has no node."
    )
    decision: Decision | None = Field(description="null if it does not react, or the alert has resolved.")
    run_id: str | None = Field(description="The run that handles the alert already, or that it would join.")
    waits_for: str | None = Field(description="The run whose lock it would wait for.")
    guards: list[str] = Field(description="One sentence per guard, with its usage.")
    steps: list[StepPlanView]


class ExplainedAlertView(View):
    alert_name: str
    labels: dict[str, str]
    status: AlertStatus
    starts_at: datetime
    reason: str = Field(description="Why no playbook reacts; empty if one does.")
    acting: list[str] = Field(description="Playbooks that would act. Several act one after the other, independently.")
    kept_back: str = Field(
        description=(
            "Why Alertmanager does not send it, according to the API that listed it, such as `silenced by` an ID; "
            "otherwise empty."
        )
    )
    told: list[str] = Field(description="Runs that would be notified that the alert has resolved.")
    playbooks: list[ExplanationView] = Field(description="Playbooks that name the alertname.")
    suggestion: alert_list.SuggestionView | None = Field(
        description="Possible rename in the alert map, if no playbook names its alertname; otherwise null."
    )
    original_alert_name: str | None = Field(description=alert_list.ORIGINAL_NAME)
    original_labels: dict[str, str] | None = Field(description=alert_list.ORIGINAL_LABELS)


class ServerState(View):
    mode: Mode | None = Field(description="The server's mode; null without a server.")
    paused: bool
    paused_by: str | None
    breaker_open: bool
    breaker_reason: str | None


class ExplainView(View):
    at: datetime = Field(description="Time at which the alerts' age was judged.")
    server: ServerState | None = Field(description="null without a server.")
    items: list[ExplainedAlertView]
    test: str | None = Field(description="A test file for `trainmedic playbook test`, if requested.")


def view(
    explained: Sequence[ExplainedAlert],
    names: alert_list.ReactingPlaybooks,
    at: datetime,
    controls: Controls | None = None,
    mode: Mode | None = None,
    test: str | None = None,
    kept_back: Sequence[str] = (),
) -> ExplainView:
    # Without `controls`, as in the command line.
    server = ServerState.of(controls, mode=mode) if controls is not None else None
    reasons = itertools.chain(kept_back, itertools.repeat(""))
    items = [_alert_view(each, names, why) for each, why in zip(explained, reasons, strict=False)]
    return ExplainView(at=at, server=server, items=items, test=test)


def _alert_view(explained: ExplainedAlert, names: alert_list.ReactingPlaybooks, kept_back: str) -> ExplainedAlertView:
    alert = explained.alert
    suggestion = alert_list.suggested(alert, names)
    return ExplainedAlertView.of(
        alert,
        alert_name=alert.name,
        reason=_reason(explained, names, suggestion),
        acting=explained.acting,
        kept_back=kept_back,
        told=explained.told,
        playbooks=[each for each in explained.playbooks if each.names_alert],
        suggestion=suggestion,
        original_alert_name=alert.original_name,
        original_labels=alert.original,
    )


def _reason(
    explained: ExplainedAlert,
    names: alert_list.ReactingPlaybooks,
    suggestion: alert_list.SuggestionView | None,
) -> str:
    if explained.refused:
        return f"not accepted by the alert map: {explained.refused}"
    if any(each.matched for each in explained.playbooks):
        return ""
    if explained.alert.name not in names:
        return alert_list.why_no_playbook(explained.alert.name, names, suggestion)
    return "; ".join(f"{each.playbook}: {each.why}" for each in explained.playbooks if each.names_alert)


def router(engine: Engine, catalog: Library, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("alerts", parts.auth)

    @routes.post(
        "/explain",
        summary="Forecast for an alert",
        response_model=ExplainView,
        responses=responses(400, 408, 413, 415),
        dependencies=[Depends(routes.viewer)],
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": "An alert, in any form: a webhook's body, one alert, Alertmanager's `GET "
                "/api/v2/alerts` or `amtool alert query -o json`, a run of the history, a received alert.",
                "content": {"application/json": {"schema": {}, "example": {"labels": {"alertname": "TrainingNaN"}}}},
            }
        },
    )
    async def explained(
        request: Request,
        at: Annotated[
            TimeText | None,
            Query(description="Judge the alerts' age and end as of this time; everything else is as it is now."),
        ] = None,
        test: Annotated[bool, Query(description="Also write a test file.")] = False,
    ) -> Response:
        """Judge alerts as if delivered now, with the present playbooks, guards, locks, controls and topology. Nothing
        is changed or stored.
        """
        now = parts.clock.now()
        moment = time_of(at, now) if at else None
        async with parts.bodies.read(request, _BODY_BYTES) as body:
            document = parse_json(body)
            alerts, kept_back = given_alerts.read(document, moment or now), given_alerts.kept_back(document)
        explained = await engine.explain(alerts, moment)
        written = test_text.write(await engine.explain_for_a_test(alerts)) if test else None
        names, controls = alert_list.by_alertname(catalog), engine.controls
        return AsciiJson.of(view(explained, names, moment or now, controls, engine.mode, written, kept_back))

    return routes
