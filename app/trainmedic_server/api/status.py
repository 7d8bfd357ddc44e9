"""``GET /health``, ``/ready`` and ``/metrics``, without a token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from msgspec import Struct
from prometheus_client.exposition import choose_encoder
from pydantic import Field

from trainmedic_core.words import count
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_server import __version__, telemetry
from trainmedic_server.api.pauses import PauseView, pause_views
from trainmedic_server.api.view import ApiModel
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain import upcoming
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.topology import SlurmTopology
from trainmedic_server.engine.service import Engine
from trainmedic_server.engine.service_watch import ServiceState
from trainmedic_server.errors import BusExplained, StoreExplained, TrainmedicError
from trainmedic_server.http import problems
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.ports.outside import UNSIGNED, Clock, ClockWatch, CommandBus
from trainmedic_server.ports.store import RunStore


class Health(ApiModel):
    status: Literal["healthy"] = "healthy"
    timestamp: datetime
    version: str


class Dependency(ApiModel):
    ok: bool
    detail: str
    caution: bool = Field(False, description="True if it works, and `detail` states a risk.")


_SERVICE_OF = (
    "The service of `{}`, asked every 30 s; null if it is not set, or on a standby. `ready` does not depend on it."
)
_CHANNELS_ARE_SET = "all channels that playbooks name are configured"
_TOKENS_ARE_READ = "no changed tokens file was rejected"
_TOKENS_REJECTED = "the changed tokens file is invalid: the earlier tokens stay valid; the server's log has the reason"
_FOLLOWED = "the server uses the time of the machine's clock"


class Ready(ApiModel):
    ready: bool = Field(description="True if the store, Redis and playbooks are ok, and `alert_map` is usable.")
    mode: Mode = Field(
        description="Upper limit for all playbooks. A standby states the mode that it will have as the leader."
    )
    store: Dependency
    redis: Dependency
    signed: bool | None = Field(
        None,
        description=(
            "Whether a signing key is used, so that writing to Redis alone commands nothing. Null on a standby."
        ),
    )
    playbooks: Dependency
    log_rules: Dependency = Field(
        Dependency(ok=True, detail="0 loaded"),
        description="Log rules for agents; `ready` does not depend on them.",
    )
    alert_map: Dependency | None = Field(
        None,
        description=(
            "The alert map; null if none is set. `ready` depends on it only while a file was never loaded, so that no "
            "alert is accepted."
        ),
    )
    clock: Dependency = Field(
        Dependency(ok=True, detail=_FOLLOWED), description="The machine's clock; `ready` does not depend on it."
    )
    notifications: Dependency = Field(
        Dependency(ok=True, detail=_CHANNELS_ARE_SET),
        description="State of the notification channels that playbooks name; `ready` does not depend on it.",
    )
    tokens: Dependency = Field(
        Dependency(ok=True, detail=_TOKENS_ARE_READ),
        description=(
            "The tokens file. While it is invalid, its earlier tokens stay valid, removed ones too; `ready` does not "
            "depend on it."
        ),
    )
    slurm: Dependency | None = Field(
        None,
        description=(
            "Slurm; null if it is not configured, or on a standby. `ready` does not depend on it. While it does not "
            "answer, the server uses the nodes and jobs of the time that `detail` states."
        ),
    )
    alertmanager: Dependency | None = Field(None, description=_SERVICE_OF.format("--alertmanager"))
    prometheus: Dependency | None = Field(None, description=_SERVICE_OF.format("--prometheus-url"))
    paused: bool = Field(description="Whether everything is paused; `pauses` also lists partial ones.")
    breaker_open: bool
    pauses: list[PauseView] = Field(default_factory=list, description="Present and future pauses.")


_READY_RESPONSES: dict[int | str, dict[str, Any]] = {
    503: {"model": Ready, "description": "A dependency does not work; webhooks may still be accepted."},
    **problems.responses(422),
}


class Readiness(Struct, frozen=True):
    """What `Ready` is about. Caveats and warnings may be empty."""

    engine: Engine
    store: RunStore
    bus: CommandBus
    catalog: Library
    log_rules: LogRuleLibrary
    alert_map: AlertMapLibrary
    clock: Clock
    watch: ClockWatch
    check_seconds: float
    redis_caveat: Callable[[], str]
    channel_warning: Callable[[], str]
    routing_caveat: str
    tokens_rejected: Callable[[], bool]
    slurm_topology: Callable[[], SlurmTopology] | None  # None without Slurm
    services: Mapping[str, Callable[[], ServiceState]]  # by member of `Ready`

    async def now(self) -> Ready:
        """Check the store and Redis at once. One without an answer after `check_seconds` is not ok."""
        now, seconds = self.clock.now(), self.check_seconds
        store, redis = await asyncio.gather(
            _check(self.store.check, "the run store", seconds), _check(self.bus.check, "Redis", seconds)
        )
        caveats = (self.redis_caveat(), "" if self.bus.is_signed else UNSIGNED)
        if redis.ok and any(caveats):
            redis = Dependency(ok=True, detail="; ".join(filter(None, (redis.detail, *caveats))), caution=True)
        playbooks, controls = _playbooks(self.catalog), self.engine.controls
        return Ready(
            ready=store.ok and redis.ok and playbooks.ok and not self.alert_map.current.unusable,
            mode=self.engine.mode,
            store=store,
            redis=redis,
            signed=self.bus.is_signed,
            playbooks=playbooks,
            log_rules=_log_rules(self.log_rules),
            alert_map=_alert_map(self.alert_map) if self.alert_map.is_used else None,
            clock=_clock(self.watch.ahead),
            notifications=self._notifications(),
            tokens=_tokens(self.tokens_rejected()),
            slurm=_slurm(self.slurm_topology()) if self.slurm_topology is not None else None,
            paused=controls.paused,
            breaker_open=controls.breaker_open,
            pauses=pause_views(controls, now),
            **{member: _service(state()) for member, state in self.services.items()},
        )

    def _notifications(self) -> Dependency:
        if warning := self.channel_warning():
            return Dependency(ok=False, detail=warning)
        return Dependency(ok=True, detail=self.routing_caveat or _CHANNELS_ARE_SET, caution=bool(self.routing_caveat))


def router(readiness: Readiness, metrics: telemetry.Metrics) -> APIRouter:
    # A parameter that a proxy adds to a probe or a scrape must not make it fail, so these routes take any.
    routes = APIRouter(tags=["status"], default_response_class=AsciiJson)

    @routes.get("/health", summary="Liveness")
    async def health() -> Health:
        return Health(timestamp=readiness.clock.now(), version=__version__)

    @routes.get("/ready", summary="Readiness", responses=_READY_RESPONSES)
    async def ready(
        response: Response,
        any_server: Annotated[
            bool, Query(alias="any", description="With several servers: the leader's state.")
        ] = False,  # for a standby, which then forwards the request here
    ) -> Ready:
        """One entry per dependency. A standby is not ready, and states this.

        While only Redis is unavailable, webhooks are still accepted and recorded. So a probe that routes deliveries
        should use `/health`.
        """
        now = await readiness.now()
        if not now.ready:
            response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return now

    @routes.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def exposition(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        content: bytes = await asyncio.to_thread(encode, metrics.registry)  # several MB for a large fleet
        return Response(content, headers={"Content-Type": content_type})

    return routes


def _clock(ahead: float) -> Dependency:  # seconds by which the machine's clock was set; 0 if the server follows it
    if not ahead:
        return Dependency(ok=True, detail=_FOLLOWED)
    change = f"{abs(ahead):.0f} s {'forward' if ahead > 0 else 'back'}"
    return Dependency(
        ok=False,
        detail=f"the machine's clock was set {change}; the server keeps the earlier time until the clock was steady "
        "for 15 minutes. If the new time is wrong, correct it",
    )


def _tokens(is_rejected: bool) -> Dependency:
    return Dependency(ok=not is_rejected, detail=_TOKENS_REJECTED if is_rejected else _TOKENS_ARE_READ)


def _slurm(topology: SlurmTopology) -> Dependency:
    if topology.answers:
        return Dependency(ok=True, detail=f"answers, with {count(len(topology.nodes), 'node')}")
    if topology.silent_since is None:
        return Dependency(ok=False, detail="is being read for the first time since the server's start")
    since = upcoming.clock(topology.silent_since)
    return Dependency(ok=False, detail=f"does not answer since {since}; the server's log has the reason")


def _service(state: ServiceState) -> Dependency:
    if state.problem is None:
        return Dependency(ok=True, detail="answers")
    if not state.problem:
        return Dependency(ok=True, detail="not asked yet")
    return Dependency(ok=False, detail=f"cannot be used since {upcoming.clock(state.since)}: {state.problem}")


async def _check(check: Callable[[], Awaitable[Any]], name: str, seconds: float) -> Dependency:
    try:
        async with asyncio.timeout(seconds):
            await check()
    except TimeoutError:
        return Dependency(ok=False, detail=f"{name} did not answer within {seconds:g} s")
    except BusExplained as error:
        return Dependency(ok=False, detail=str(error))
    except StoreExplained as error:
        return Dependency(ok=False, detail=f"{name} cannot be used: {error.reason}")
    except TrainmedicError:
        return Dependency(ok=False, detail=f"{name} does not answer")
    return Dependency(ok=True, detail="answers")


def _playbooks(catalog: Library) -> Dependency:
    """Fail only if there are errors and nothing is loaded."""
    loaded, failed = len(catalog.all()), len(catalog.problems)
    detail = f"{loaded} loaded" + (f", {failed} errors: see /playbooks" if failed else "")
    return Dependency(ok=loaded > 0 or failed == 0, detail=detail)


def _log_rules(rules: LogRuleLibrary) -> Dependency:
    loaded, failed = len(rules.rule_set.rules), len(rules.problems)
    more = f", {failed} errors: see the log, or trainmedic logs check" if failed else ""
    return Dependency(ok=not failed, detail=f"{loaded} loaded{more}")


def _alert_map(alert_map: AlertMapLibrary) -> Dependency:
    current, failed = alert_map.current, len(alert_map.problems)
    if current.unusable:
        return Dependency(ok=False, detail=f"no alert is accepted: {current.unusable}: see /playbooks")
    more = f", {count(failed, 'error')}: see /playbooks, or trainmedic playbook check --alert-map" if failed else ""
    detail = f"{count(current.names, 'name')} renamed, {count(len(current.accept), 'condition')}{more}"
    return Dependency(ok=not failed, detail=detail)
