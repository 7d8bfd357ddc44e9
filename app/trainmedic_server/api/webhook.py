"""``POST /webhook`` and ``POST /events/{name}``: accept alerts, and reply once they are durable.

FastAPI costs more than an admission. So neither uses its validation, and `WebhookApp` answers Alertmanager before
middleware and routing (``http/factory``); `declare` only documents that route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trainmedic.wire.envelope import new_id
from trainmedic_server import telemetry
from trainmedic_server.api import payload, received_events, schemas, usual_payload
from trainmedic_server.api.own_alerts import OwnAlerts
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.domain.admission import Admission
from trainmedic_server.domain.alert import Delivery, RejectedAlert
from trainmedic_server.engine.service import Engine
from trainmedic_server.errors import TrainmedicError
from trainmedic_server.http import problems
from trainmedic_server.http.body import BodyReader, parse_json
from trainmedic_server.http.limits import KIB
from trainmedic_server.ports.outside import Clock

# Bodies from this size on are parsed in a thread. That takes tens of milliseconds, mostly in Python, and the event loop
# continues at each thread switch.
_LARGE_BYTES = 256 * KIB

PATH = "/webhook"


class RefusalReason(StrEnum):
    """Cause of a final 4xx reply to a delivery."""

    UNAUTHORIZED = "unauthorized"  # No token, or an unknown one (401)
    FORBIDDEN = "forbidden"  # The token lacks the role `webhook` (403)
    TOO_LARGE = "too_large"  # The body exceeds a limit (413)
    UNREADABLE = "unreadable"
    """Any other, such as a body that is incomplete, not JSON, or no payload of version "4"."""


_REASON_OF_STATUS: Mapping[int, RefusalReason] = {
    HTTPStatus.UNAUTHORIZED: RefusalReason.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN: RefusalReason.FORBIDDEN,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: RefusalReason.TOO_LARGE,
}

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Parser = Callable[[bytearray, datetime], Delivery]  # of a body that was received at this time


class _PlainRoute(APIRoute):
    # The handler gets the request itself, without FastAPI's validation.
    def get_route_handler(self) -> _Handler:
        handler: _Handler = self.endpoint
        return handler


def endpoint(
    engine: Engine,
    own_alerts: OwnAlerts,
    auth: Authenticator,
    bodies: BodyReader,
    clock: Clock,
    metrics: telemetry.Metrics,
    parser_for: Callable[[Request], Parser] = lambda _: _parse_alertmanager,
) -> _Handler:
    outcomes = {name: metrics.deliveries.labels(name) for name in ("accepted", "refused", "unavailable", "failed")}
    refusals = {reason: metrics.refused_deliveries.labels(reason) for reason in RefusalReason}

    async def webhook(request: Request) -> Response:
        """Accept a delivery of alerts.

        The reply comes once everything is committed. After a 5xx, Alertmanager sends the delivery again. A 4xx is
        final.
        """
        began = time.perf_counter()
        outcome = "failed"
        try:
            auth.require(request, TokenRole.WEBHOOK)
            received_at, parse = clock.now(), parser_for(request)
            async with bodies.read(request) as body:
                if len(body) < _LARGE_BYTES:
                    delivery = parse(body, received_at)
                else:
                    delivery = await asyncio.to_thread(parse, body, received_at)
                admission = await engine.admit(await own_alerts.checked(delivery))
            outcome = "accepted"
            return Response(reply(admission), media_type="application/json")
        except TrainmedicError as error:
            status = problems.from_error(error).status
            outcome = _outcome(status)
            if outcome == "refused":
                refusals[_REASON_OF_STATUS.get(status, RefusalReason.UNREADABLE)].inc()
            raise
        finally:
            outcomes[outcome].inc()
            metrics.webhook_seconds.observe(time.perf_counter() - began)

    return webhook


class WebhookApp:
    def __init__(self, handle: _Handler) -> None:
        self._handle = handle

    @staticmethod
    def takes(scope: Scope) -> bool:
        """Also True for ``//webhook`` and ``/webhook/``: Alertmanager never retries a 404, which would lose alerts."""
        return bool(scope["type"] == "http" and scope["method"] == "POST" and "/" + scope["path"].strip("/") == PATH)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        try:
            response = await self._handle(Request(scope, receive))
        except TrainmedicError as error:
            response = problems.answer_error(scope, error)
        await response(scope, receive, send)


def declare(routes: APIRouter, handle: _Handler) -> None:  # for OpenAPI; `WebhookApp` serves it
    routes.add_api_route(
        PATH,
        handle,
        methods=["POST"],
        tags=["webhook"],
        summary="Receive alerts from Alertmanager",
        route_class_override=_PlainRoute,
        response_model=schemas.WebhookReply,
        responses={
            200: {"content": {"application/json": {"example": schemas.REPLY_EXAMPLE}}},
            **problems.responses(400, 401, 403, 408, 413, 415, 422, 503),
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {"$ref": "#/components/schemas/AlertmanagerPayload"},
                        "example": schemas.PAYLOAD_EXAMPLE,
                    }
                },
            }
        },
    )


def declare_events(routes: APIRouter, handle: _Handler) -> None:
    routes.add_api_route(
        received_events.PATH,
        handle,
        methods=["POST"],
        tags=["webhook"],
        summary=received_events.SUMMARY,
        description="Any JSON. The alert map makes labels of it, or alerts.",
        name="event",
        route_class_override=_PlainRoute,
        response_model=schemas.WebhookReply,
        responses=problems.responses(400, 401, 403, 404, 408, 413, 415, 422, 503),
        openapi_extra={
            "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
            "requestBody": {"required": True, "content": {"application/json": {"schema": {}}}},
        },
    )


def reply(admission: Admission) -> bytes:
    written: bytes = to_json(
        {
            "delivery_id": admission.delivery_id,
            "alerts": admission.alerts,
            "runs": [
                {
                    "run_id": run.run_id,
                    "playbook": run.playbook,
                    "target": run.target or None,
                    "decision": str(run.decision),
                }
                for run in admission.runs
            ],
            "duplicates": admission.duplicates,
            "unmatched": admission.unmatched,
            "truncated": admission.truncated,
            "rejected": [_rejected(alert) for alert in admission.rejected[: payload.PROBLEMS_REPORTED]],
            "rejected_total": len(admission.rejected),
            "ignored": [{"field": field, "message": message} for field, message in admission.ignored],
        },
        ensure_ascii=True,
    )
    return written.replace(b"\x7f", b"\\u007f")  # same result as `json_bytes` in a fifth of the time


def _rejected(alert: RejectedAlert) -> dict[str, Any]:
    return {
        "index": alert.index,
        "alert_name": alert.name,
        "fingerprint": None if alert.identity is None else alert.identity.fingerprint,
        "reason": alert.reason,
        "end_taken": alert.is_end,
    }


def _parse_alertmanager(body: bytearray, received_at: datetime) -> Delivery:
    delivery_id = new_id()
    usual = usual_payload.read(body, delivery_id, received_at)
    if usual is not None:
        return usual
    document = parse_json(body, keep_half_pairs=True)
    return payload.with_genuine_fingerprints(payload.delivery(document, delivery_id, received_at))


def _outcome(status: int) -> str:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "unavailable"
    return "refused" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"
