"""Requests that are not what they should be: mutated deliveries, and every route by every role.

Whatever is sent, the answer is one that is declared, no failure of the server, and the server is well afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.attack.effort import random_source, trials
from tests.attack.odd_documents import mutated
from tests.attack.siege import ROLES, bearer
from tests.support.api_world import Address, World, alert, openapi_document, payload
from tests.support.clocks import START
from tests.support.programs import Program, start_server
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.ports.outside import Presence

DELIVERIES = trials(300, 100_000)
EXAMPLES = trials(1, 500)

DECLARED = {200, 400, 408, 413, 415, 422, 503}


def real_deliveries() -> list[dict[str, Any]]:
    """As Alertmanager sends them: one alert, several, resolved, with much text."""
    resolved = alert(status="resolved", endsAt="2026-01-31T12:05:00Z", fingerprint="ad7c2f1b9e0d4455")
    hot = alert(labels={"alertname": "GPUTemperatureHigh", "UUID": "GPU-5f3a", "Hostname": "n1", "gpu": "0"})
    long = alert(annotations={"description": "loss = nan\n" * 500, "runbook_url": "https://runbooks.example.org/a"})
    return [
        payload(),
        payload(hot, resolved),
        payload(resolved, status="resolved"),
        payload(long, hot, truncatedAlerts=3),
    ]


HEADERS: tuple[dict[str, str], ...] = (
    *({},) * 20,
    {"Content-Type": "text/plain; charset=utf-16"},
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "identity"},
    {"Expect": "100-continue"},
    {"Accept": "\x7f;q=x, */*;q=0"},
    {"Origin": "http://["},
    {"X-Forwarded-Host": "evil.example"},
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Program, int]]:
    program, url = start_server(tmp_path)
    with program:
        yield program, int(url.rpartition(":")[2])


def test_mutated_deliveries_are_answered_and_the_server_stays_healthy(server: tuple[Program, int]) -> None:
    """Valid parts get a 200, the rest a problem that says what is wrong; there is no internal error."""
    program, port = server
    source, real = random_source(), real_deliveries()
    seen: dict[int, int] = {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(DELIVERIES):
        body = mutated(source, source.choice(real))
        connection.request("POST", "/webhook", body, source.choice(HEADERS))
        reply = connection.getresponse()
        content = json.loads(reply.read())
        seen[reply.status] = seen.get(reply.status, 0) + 1
        assert reply.status in DECLARED, (reply.status, content, body)
        if reply.status != 200:
            assert reply.getheader("Content-Type") == "application/problem+json"
            assert (content["status"], bool(content["detail"])) == (reply.status, True)
        if reply.getheader("Connection") == "close":
            connection.close()
    connection.close()
    print(seen)
    assert {200, 400, 422} <= seen.keys()
    for path in ("/health", "/ready"):
        connection.request("GET", path)
        reply = connection.getresponse()
        assert (reply.status, bool(reply.read())) == (200, True)
    connection.close()
    assert "Traceback" not in program.tail(100_000)


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    """A server with a token for each role, in a thread of its own."""
    started: Future[Address] = Future()
    stop: Future[None] = Future()

    async def run() -> None:
        tokens = [
            Token(role, hashlib.sha256(f"secret-of-{role}".encode()).digest(), frozenset({TokenRole(role)}))
            for role in ROLES
        ]
        world = World(auth=Authenticator(tokens))
        world.bus.present = [Presence("llm-1", START, {"ranks": 8})]
        async with world.served() as address:
            started.set_result(address)
            await asyncio.wrap_future(stop)

    thread = threading.Thread(daemon=True, target=asyncio.run, args=(run(),))
    thread.start()
    yield started.result(30)
    stop.set_result(None)
    thread.join(30)


# /events does not end, so that no client which waits for the whole answer can call it.
schema = schemathesis.openapi.from_dict(openapi_document()).exclude(path="/events")


@schema.parametrize()
@pytest.mark.parametrize("role", [None, *ROLES])
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)
def test_every_role_gets_declared_answers(case: schemathesis.Case, role: str | None, address: Address) -> None:
    """Good and bad requests with each role and without one: no internal error, and no access without the role."""
    case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() != "authorization"}
    answer = case.call(base_url=address.url, headers=bearer(role))
    case.validate_response(
        answer,
        checks=[not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance],
    )
    needed = {"/webhook": "webhook", "/pause": "operator", "/resume": "operator", "/explain": "viewer"}
    allowed = {"/health": None, "/ready": None, "/metrics": None}
    path = case.operation.path
    led_to_sign_in = urlsplit(answer.request.url or "").path == "/login"  # as a page does that has the path of a call
    if path not in allowed and answer.status_code < 300 and not led_to_sign_in:
        wanted = needed.get(path, "operator" if case.method == "POST" else "viewer")
        assert role == wanted or (role, wanted) == ("operator", "viewer")
