"""The API of a standby: answers probes and forwards everything else, tokens included, to the leader.

If the leader is unknown or does not answer, it replies 503.
"""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Protocol

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trainmedic_server import __version__, telemetry
from trainmedic_server.api.status import Dependency, Health, Ready
from trainmedic_server.domain.modes import Mode
from trainmedic_server.http import forwarding
from trainmedic_server.http.base_path import BasePath
from trainmedic_server.http.origin_check import OriginCheck
from trainmedic_server.http.problems import HttpProblem, ProblemResponse, from_validation
from trainmedic_server.ports.outside import Clock

RETRY_SECONDS = 1  # for clients; a standby takes over an ended leader in a second or two
# Refuses malformed headers only. The leader knows which names are its own.
_SITES = OriginCheck(is_open=lambda: False)
_BOOLEAN = TypeAdapter(bool)

log = telemetry.logger(__name__)


class ElectionStatus(Protocol):
    """State of the leader election (``adapters.sql_store.election``)."""

    @property
    def why(self) -> str: ...  # the reason for not being the leader

    @property
    def holder(self) -> str:
        """The leader's address, "host:port"; empty if unknown."""
        ...


class SwitchableApp:
    """The listener's application: first the standby, later the real one, without losing a request."""

    def __init__(self, standby: Standby) -> None:
        self._standby = standby
        self._app: ASGIApp = standby
        self._feed: Any = None
        self.state = SimpleNamespace(feed=self)  # the listener closes its application's feed before it stops

    def switch_to(self, app: Any) -> None:
        """Serve `app` from now on. Requests that hang at the former leader are aborted; clients retry."""
        self._app, self._feed = app, app.state.feed
        self._standby.end_forwarding()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def close(self) -> None:
        """Stop forwarding, and close the feed."""
        self._standby.end_forwarding()
        if self._feed is not None:
            await self._feed.close()


class Standby:
    def __init__(
        self, election: ElectionStatus, mode: Mode, base: BasePath, clock: Clock, metrics: telemetry.Metrics
    ) -> None:
        self._election = election
        self._base = base
        self._mode = mode
        self._clock = clock
        self._metrics = metrics
        self._forwarder = forwarding.Forwarder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self._base.strip(scope)
        try:
            _SITES.check(scope)
            response = self._own_answer(scope)
        except HttpProblem as problem:
            response = ProblemResponse(problem, scope["path"])
        if response is not None:
            await response(scope, receive, send)
            return
        leader_address = self._election.holder
        if not leader_address or any(name == forwarding.MARK for name, _ in scope["headers"]):
            await self._refuse(f"This server is on standby: {self._election.why}.", scope, receive, send)
            return
        await self._forward(leader_address, scope, receive, send)

    def end_forwarding(self) -> None:
        self._forwarder.end()

    def _own_answer(self, scope: Scope) -> Response | None:
        """Return None if the leader has to answer. Raises HttpProblem."""
        if scope["method"] not in ("GET", "HEAD"):
            return None
        match scope["path"]:
            case "/health":
                return _json(Health(timestamp=self._clock.now(), version=__version__))
            case "/ready" if not _asks_any_server(scope):
                return _json(self._ready(), HTTPStatus.SERVICE_UNAVAILABLE)
            case "/metrics":
                return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)
        return None

    def _ready(self) -> Ready:
        unused = Dependency(ok=False, detail="not used on standby")
        standing_by = Dependency(ok=False, detail=f"on standby: {self._election.why}")
        return Ready(
            ready=False,
            mode=self._mode,
            store=standing_by,
            redis=unused,
            playbooks=unused,
            log_rules=unused,
            paused=False,
            breaker_open=False,
        )

    async def _refuse(self, reason: str, scope: Scope, receive: Receive, send: Send) -> None:
        # Close the connection, so that the next attempt may reach another server.
        problem = HttpProblem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"{reason} Try again.",
            headers={"Retry-After": str(RETRY_SECONDS)},
            closes=True,
        )
        await ProblemResponse(problem, scope["path"])(scope, receive, send)

    async def _forward(self, leader_address: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._forwarder.forward(leader_address, scope, receive, send)
        except forwarding.ClientLeft:
            return
        except (forwarding.ClientSilent, forwarding.NoTurn) as error:
            # As 503, not 408: Alertmanager repeats a delivery only after a 5xx.
            await self._refuse(f"This server is on standby, and {error}.", scope, receive, send)
        except forwarding.CutOff as error:
            # The status has been sent. The response stays incomplete, which shows the client the failure.
            log.warning("leader ended a forwarded response early", error=repr(error))
        except (OSError, ValueError) as error:
            log.warning("leader does not answer a forwarded request", holder=leader_address, error=repr(error))
            await self._refuse("This server is on standby, and the leader does not answer.", scope, receive, send)


def _asks_any_server(scope: Scope) -> bool:  # ``/ready?any=true`` asks for the leader's state
    text = QueryParams(scope["query_string"]).get("any")
    try:
        return text is not None and _BOOLEAN.validate_python(text)
    except ValidationError as error:
        raise from_validation([{**mistake, "loc": ("query", "any")} for mistake in error.errors()]) from None


def _json(model: BaseModel, status: int = HTTPStatus.OK) -> Response:
    return Response(model.model_dump_json(), status, media_type="application/json")
