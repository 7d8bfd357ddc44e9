"""The API served for tests: on the loopback, before an engine and a history that live in memory.

Here is the one place where tests of the API get their engine from.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import jinja2
from fastapi import FastAPI

from tests.support.clocks import StoppedClock
from tests.support.memory_api import Dependency, MemoryCatalog, MemoryEngine, MemoryHistory, MemoryLives, MemoryLogs
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.api.channels import ChannelsApi
from trainmedic_server.api.findings import FindingsApi
from trainmedic_server.api.playbook_versions import PlaybookTextsApi
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.browser_sessions import Sessions
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.engine.kept_jobs import KeptJobs
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.http.factory import create_app
from trainmedic_server.http.limits import ConnectionLimits, ServerLimits
from trainmedic_server.http.listener import serve
from trainmedic_server.live.job_location import JobLocations
from trainmedic_server.live.log_lines import LogLinesApi
from trainmedic_server.live.now import NowApi
from trainmedic_server.ports.outside import NoClockWatch
from trainmedic_server.ports.playbook_tests import PlaybookTester, PlayedTests
from trainmedic_server.reports.compiling import ReportCompiler
from trainmedic_server.reports.reported_figures import ReportedFigures
from trainmedic_server.telemetry import Metrics, configure_logging


class CompiledTemplates(jinja2.BytecodeCache):
    """In memory: the console's templates are compiled once in a process, instead of in each world."""

    def __init__(self) -> None:
        self._code: dict[str, bytes] = {}

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        if bucket.key in self._code:
            bucket.bytecode_from_string(self._code[bucket.key])

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        self._code[bucket.key] = bucket.bytecode_to_string()


_COMPILED = CompiledTemplates()


class NoPlaybookTester:
    async def run_tests_of(self, source: str) -> PlayedTests:
        return PlayedTests(source, unfinished="This server runs no tests.")


@dataclass
class World:
    """The application and what it was handed."""

    auth: Authenticator = field(default_factory=Authenticator)
    limits: ServerLimits = field(default_factory=ServerLimits)
    history: MemoryHistory = field(default_factory=MemoryHistory)
    catalog: MemoryCatalog = field(default_factory=MemoryCatalog)
    store: Dependency = field(default_factory=Dependency)
    bus: Dependency = field(default_factory=Dependency)
    logs: Any = field(default_factory=MemoryLogs)
    metrics: Metrics = field(default_factory=Metrics)
    allowed_hosts: tuple[str, ...] = ()
    metric_history: Any = None
    external_url: str = ""
    findings: InMemoryStore = field(default_factory=InMemoryStore)
    tester: PlaybookTester = field(default_factory=NoPlaybookTester)
    channels: ChannelsApi | None = None
    alert_map: AlertMapLibrary = field(default_factory=lambda: AlertMapLibrary(()))
    slurm_topology: Any = None
    services: Any = field(default_factory=dict)
    is_stored: bool = False
    """Whether the history is the store's own, in place of `history`."""

    def __post_init__(self) -> None:
        self.auth.sessions = self.auth.sessions or Sessions(InMemoryStore(), StoppedClock())
        self.engine = MemoryEngine(self.history)
        self.lives = MemoryLives()
        self.log_rules = LogRuleLibrary(())
        runs: Any = self.findings if self.is_stored else self.history
        self.reported = ReportedFigures(self.bus, StoppedClock())  # type: ignore[arg-type]
        job_locations = JobLocations(self.bus, self.findings)  # type: ignore[arg-type]
        self.app: FastAPI = create_app(
            engine=self.engine,
            job_lives=self.lives,
            runs=runs,
            report_compiler=ReportCompiler(runs, self.metric_history, None, StoppedClock(), reported=self.reported),
            alerts=self.findings,
            now_api=NowApi(self.findings, runs, self.engine, StoppedClock(), self.external_url),
            findings_api=FindingsApi(
                self.findings, KeptJobs(self.findings, StoppedClock()), self.findings, job_locations
            ),
            lines=LogLinesApi(self.logs, job_locations),
            catalog=self.catalog,
            texts=PlaybookTextsApi(self.findings, self.tester),
            messaging=self.channels or ChannelsApi(self.findings, StoppedClock()),
            log_rules=self.log_rules,
            bus=self.bus,  # type: ignore[arg-type]
            presences=SharedPresences(self.bus, time.monotonic),  # type: ignore[arg-type]
            store=self.store,  # type: ignore[arg-type]
            metrics=self.metrics,
            auth=self.auth,
            clock=StoppedClock(),
            clock_watch=NoClockWatch(),
            limits=self.limits,
            allowed_hosts=self.allowed_hosts,
            alert_map=self.alert_map,
            slurm_topology=self.slurm_topology,
            services=self.services,
        )
        self.app.pages._parts.renderer._environment.bytecode_cache = _COMPILED  # type: ignore[attr-defined]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Calls the application directly, without a socket."""
        transport = httpx.ASGITransport(self.app, client=("192.0.2.7", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://trainmedic") as client:
            yield client

    @asynccontextmanager
    async def served(self, connections: ConnectionLimits = ConnectionLimits()) -> AsyncIterator[Address]:
        """Serves the application on the loopback, as in production."""
        stop = asyncio.Event()
        started: asyncio.Future[Address] = asyncio.get_running_loop().create_future()

        def listening(host: str, port: int) -> None:
            started.set_result(Address(host, port))

        serving = asyncio.create_task(serve(self.app, "127.0.0.1", 0, stop, listening, connections))
        try:
            yield await started
        finally:
            stop.set()
            await asyncio.wait_for(serving, 60)


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def raw(self, request: bytes, seconds: float = 10.0) -> bytes:
        """Send exactly these bytes; return all that comes until the server closes."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(request)
        async with asyncio.timeout(seconds):
            answer = await reader.read()
        writer.close()
        return answer


@contextmanager
def logged() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Collects what the server logs, as in production, every line read back from its JSON."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("DEBUG", stream)
    try:
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@functools.cache
def openapi_document() -> dict[str, Any]:
    return World().app.openapi()


def alert(**changes: Any) -> dict[str, Any]:
    """One entry of ``alerts``, as Alertmanager sends it."""
    entry: dict[str, Any] = {
        "status": "firing",
        "labels": {"alertname": "GPUHot", "node": "node-1"},
        "annotations": {"summary": "hot"},
        "startsAt": "2026-01-31T11:59:00.123456789Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus:9090/graph",
        "fingerprint": "c6eadffa33fcdf37",
    }
    return {name: value for name, value in {**entry, **changes}.items() if value is not ...}


def payload(*alerts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A webhook body, as Alertmanager sends it. `...` as a value leaves the member out."""
    body: dict[str, Any] = {
        "receiver": "trainmedic",
        "status": "firing",
        "alerts": list(alerts) or [alert()],
        "groupLabels": {"alertname": "GPUHot"},
        "commonLabels": {"alertname": "GPUHot"},
        "commonAnnotations": {},
        "externalURL": "http://alertmanager:9093",
        "version": "4",
        "groupKey": '{}:{alertname="GPUHot"}',
        "truncatedAlerts": 0,
    }
    return {name: value for name, value in {**body, **changes}.items() if value is not ...}
