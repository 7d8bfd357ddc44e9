"""A server with the console, in a thread of its own, for tests that look at it in a browser."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from msgspec.structs import replace

from tests.support import busy_cluster, job_log_scene
from tests.support.api_world import World, alert, payload
from tests.support.clocks import START, StoppedClock
from tests.support.filed_logs import FiledLogs
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.browser_sessions import Sessions
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.domain.run import Status, StepState, StepStatus
from trainmedic_server.ports.outside import Presence

TOKENS = {"hook": TokenRole.WEBHOOK, "look": TokenRole.VIEWER, "op": TokenRole.OPERATOR}
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@dataclass(frozen=True)
class Lab:
    """Where the server is, and its world."""

    url: str
    world: World
    logs: FiledLogs

    def fire(self, node: str = "node-1", **labels: str) -> str:
        """Deliver an alert; the id of its run."""
        entry = alert(
            labels={"alertname": "GPUHot", "node": node, **labels},
            fingerprint=hashlib.sha256(repr((node, labels)).encode()).hexdigest()[:16],
            annotations={"summary": HOSTILE, "dashboard": "javascript:document.title='taken'"},
            generatorURL="javascript:document.title='taken'",
        )
        answer = httpx.post(
            f"{self.url}/webhook", json=payload(entry), headers={"authorization": "Bearer hook"}, timeout=60
        )
        return str(answer.json()["runs"][0]["run_id"])

    def open_stream(self, path: str, secret: str) -> http.client.HTTPConnection:
        """Ask for a stream, and read none of it but its head."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        connection.request("GET", path, headers={"authorization": f"Bearer {secret}"})
        connection.getresponse()
        return connection

    def ask(self, node: str) -> str:
        """Deliver an alert whose run then waits for a person; the run's id."""
        run_id = self.fire(node)
        record = self.world.history.records[run_id]
        step = StepState("steps", 0, "sure", "approve", status=StepStatus.WAITING, message="Go on?", started_at=START)
        run = replace(record.run, status=Status.AWAITING_APPROVAL, waiting_on="approval", steps=(step,))
        self.world.history.records[run_id] = replace(record, run=run)
        self.world.history.append("awaiting_approval", run_id)
        return run_id


def _world(external_url: str, logs: FiledLogs, is_busy: bool) -> World:
    tokens = [
        Token(role.value, hashlib.sha256(secret.encode()).digest(), frozenset({role}))
        for secret, role in TOKENS.items()
    ]
    auth = Authenticator(tokens)
    auth.sessions = Sessions(InMemoryStore(), StoppedClock())
    world = World(auth=auth, external_url=external_url, logs=logs, is_stored=is_busy)
    gpus: list[dict[str, Any]] = [{"index": each, "uuid": busy_cluster.gpu_uuid("node-1", each)} for each in range(8)]
    world.bus.present = [Presence("node-1", START, {"gpus": gpus, "version": HOSTILE})]
    return world


@contextmanager
def console_lab(external_url: str = "", *, is_busy: bool = False) -> Iterator[Lab]:
    """The server, while the block lasts; with `is_busy` behind it a cluster after a day (`busy_cluster`)."""
    started: Future[Lab] = Future()
    stop: Future[None] = Future()

    async def run() -> None:
        logs = FiledLogs()
        world = _world(external_url, logs, is_busy)
        if is_busy:
            await busy_cluster.arrange(world)
        await job_log_scene.arrange(world, logs)
        async with world.served() as address:
            started.set_result(Lab(address.url, world, logs))
            await asyncio.wrap_future(stop)

    thread = threading.Thread(daemon=True, target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield started.result(120)
    finally:
        stop.set_result(None)
        thread.join(30)
