"""Factory of the FastAPI application."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainmedic_core.plain_text import json_bytes
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_server import __version__, errors, telemetry
from trainmedic_server.api import (
    alert_list,
    channels,
    explanations,
    findings,
    history,
    jobs,
    operations,
    playbook_versions,
    received_events,
    reports,
    schemas,
    status,
    webhook,
)
from trainmedic_server.api.own_alerts import OwnAlerts
from trainmedic_server.auth import audit, sessions
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.catalog.library import Library
from trainmedic_server.console.app import ConsoleApp
from trainmedic_server.console.build import console
from trainmedic_server.domain.missing_channels import unset_channels
from trainmedic_server.domain.topology import ClusterTopology, SlurmTopology
from trainmedic_server.engine.job_watch import JobWatch
from trainmedic_server.engine.runbooks import Runbooks
from trainmedic_server.engine.service import Engine
from trainmedic_server.engine.service_watch import ServiceState
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.http import problems
from trainmedic_server.http.api_routes import RouteParts
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.http.base_path import BasePath
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.client_presence import while_client_waits
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.http.origin_check import OriginCheck
from trainmedic_server.http.read_turns import ReadTurns
from trainmedic_server.http.streaming import ClientStalled
from trainmedic_server.live import events, log_lines, now
from trainmedic_server.live.event_feed import EventFeed
from trainmedic_server.ports.outside import Clock, ClockWatch, CommandBus
from trainmedic_server.ports.received_alerts import ReceivedAlerts
from trainmedic_server.ports.store import RunStore
from trainmedic_server.reports.compiling import ReportCompiler, ReportHistory

log = telemetry.logger(__name__)

_DESCRIPTION = """Takes alerts from Alertmanager, repairs their causes by playbook, and shows what it did and why.

Errors are `application/problem+json` (RFC 9457). Unknown query parameters are refused (422), except by
webhooks, events, probes and `/metrics`. A token is given as Bearer, or as the password of Basic with any user name;
where no tokens are configured, none is asked for."""
_WITHOUT_TOKEN = frozenset({"/health", "/ready", "/metrics"})


def create_app(
    *,
    engine: Engine,
    job_lives: JobWatch,
    runs: ReportHistory,
    report_compiler: ReportCompiler,
    alerts: ReceivedAlerts,
    now_api: now.NowApi,
    findings_api: findings.FindingsApi,
    lines: log_lines.LogLinesApi,
    catalog: Library,
    texts: playbook_versions.PlaybookTextsApi,
    messaging: channels.ChannelsApi,
    log_rules: LogRuleLibrary,
    bus: CommandBus,
    presences: SharedPresences,
    store: RunStore,
    metrics: telemetry.Metrics,
    auth: Authenticator,
    clock: Clock,
    clock_watch: ClockWatch,
    limits: ServerLimits = ServerLimits(),
    cluster_topology: Callable[[], ClusterTopology] = ClusterTopology,
    slurm_topology: Callable[[], SlurmTopology] | None = None,
    services: Mapping[str, Callable[[], ServiceState]] = MappingProxyType({}),
    allowed_hosts: Collection[str] = (),
    redis_caveat: Callable[[], str] = str,
    alert_map: AlertMapLibrary,
    runbooks: Runbooks = Runbooks(),
) -> FastAPI:
    """Return the API and the console. Without tokens, `allowed_hosts` are served too (`OriginCheck`)."""
    bodies, reads = BodyReader(limits), ReadTurns(limits.reads, limits.waiting_reads, "pages of the history")

    own = OwnAlerts(findings_api.history, findings_api.verdicts, runbooks)
    handle = webhook.endpoint(engine, own, auth, bodies, clock, metrics)
    base = BasePath(now_api.external_url)
    app = _Api(webhook.WebhookApp(handle), OriginCheck(allowed_hosts, lambda: not auth.has_tokens), base, metrics)
    feed = app.state.feed = EventFeed(runs, limits.poll_seconds, limits.streams, metrics)
    webhook.declare(app.router, handle)
    reader = received_events.reader(alert_map)
    webhook.declare_events(app.router, webhook.endpoint(engine, own, auth, bodies, clock, metrics, reader))
    parts = RouteParts(auth, bodies, clock, limits, reads)
    readiness = status.Readiness(
        engine,
        store,
        bus,
        catalog,
        log_rules,
        alert_map,
        clock,
        clock_watch,
        limits.check_seconds,
        redis_caveat,
        lambda: unset_channels((each.definition for each in catalog.all()), messaging.services),
        messaging.routes.caveat,
        auth.has_rejected_file,
        slurm_topology,
        services,
    )
    routers = (
        history.router(runs, findings_api.history, now_api, parts, report_compiler.has_metrics),
        now.router(now_api, parts),
        alert_list.router(alerts, catalog, parts),
        explanations.router(engine, catalog, parts),
        *findings_api.routers(parts),
        *([sessions.router(auth.sessions, parts)] if auth.sessions is not None else ()),
        events.router(feed, parts),
        audit.router(runs, parts),
        *operations.routers(engine, job_lives, catalog, report_compiler, now_api, parts, alert_map),
        playbook_versions.router(catalog, texts, parts),
        channels.router(messaging, parts),
        jobs.router(bus, presences, cluster_topology, parts),
        lines.router(parts),
        reports.router(report_compiler, parts),
    )
    for routes in (*routers, status.router(readiness, metrics)):
        app.router.routes.extend(routes.routes)  # `include_router` would build each route again
    app.pages = console(app.answer, app.answers, feed, parts, base, metrics, presences)
    app.add_middleware(_Boundary, metrics=metrics)
    return _with_openapi(app, base, [model for routes in routers for model in routes.body_models])


class _Api(FastAPI):
    """Dispatcher of requests: deliveries past FastAPI, browser requests to the console, the rest to FastAPI."""

    pages: ConsoleApp

    def __init__(self, deliveries: ASGIApp, origins: OriginCheck, base: BasePath, metrics: telemetry.Metrics) -> None:
        super().__init__(
            title="Trainmedic",
            version=__version__,
            description=_DESCRIPTION,
            docs_url=None,
            redoc_url=None,
            default_response_class=AsciiJson,
            redirect_slashes=False,
        )
        self._deliveries = _Boundary(deliveries, metrics)
        self._origins = origins
        self._base = base
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._base.strip(scope)
            try:
                self._origins.check(scope)
            except problems.HttpProblem as problem:
                await problems.answer(scope, problem)(scope, receive, send)
                return
        if webhook.WebhookApp.takes(scope):
            await self._deliveries(scope, receive, send)
        elif scope["type"] == "http" and self.pages.takes(scope):
            await while_client_waits(_Boundary(self.pages, self._metrics), scope, receive, send)
        else:
            await while_client_waits(self.answer, scope, receive, _uncached(send))

    def answers(self, scope: Scope) -> bool:  # True for a path of the API
        return any(route.matches(scope)[0] is not Match.NONE for route in self.router.routes)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


def _uncached(send: Send) -> Send:
    """Forbid caching: an answer depends on the caller and on the Accept header."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("Cache-Control", "no-store")
            headers.setdefault("X-Content-Type-Options", "nosniff")
            headers.add_vary_header("Accept, Authorization, Cookie")
        await send(message)

    return marked


class _Boundary:
    """Handler that logs and counts unexpected errors, and answers 500 without details."""

    def __init__(self, app: ASGIApp, metrics: telemetry.Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientStalled:
            # The response stays incomplete, so the listener closes the connection.
            log.info("stream ended: the client does not read it", path=scope["path"])
        except Exception:  # one request must not affect others
            self._metrics.loop_errors.labels("http").inc()
            log.exception("request failed", method=scope["method"], path=scope["path"])
            if not started:
                problem = problems.from_error(errors.TrainmedicError())
                await problems.ProblemResponse(problem, scope["path"])(scope, receive, send)


def _with_openapi(app: FastAPI, base: BasePath, bodies: Iterable[type[BaseModel]]) -> FastAPI:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _complete(document, bodies)
            if base.link:
                document["servers"] = [{"url": base.link}]
            app.openapi_schema = document
        return app.openapi_schema

    problems.register(app)
    app.openapi = openapi  # type: ignore[method-assign]
    rendered: list[bytes] = []

    async def document(_: Request) -> Response:
        # Render it once: it is large, and needs no token.
        if not rendered:
            rendered.append(json_bytes(app.openapi()))
        return Response(rendered[0], media_type="application/json")

    url = app.openapi_url
    assert url is not None
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != url]
    app.add_route(url, document, include_in_schema=False)
    return app


def _complete(document: dict[str, Any], bodies: Iterable[type[BaseModel]]) -> None:
    """Add tokens, errors, and bodies that our handlers read."""
    components = document["components"]["schemas"]
    models: list[type[BaseModel]] = [problems.ProblemDetails, schemas.AlertmanagerPayload, *bodies]
    for model in models:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        components.update(schema.pop("$defs", {}))
        components[model.__name__] = schema
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "basic": {"type": "http", "scheme": "basic", "description": "Any user name; the token as the password."},
    }
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path not in _WITHOUT_TOKEN:
                operation["security"] = [{"bearer": []}, {"basic": []}]
