"""The API against its own OpenAPI document: whatever a client sends, the answer is one of those declared."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support import parts
from tests.support.api_world import Address, World, openapi_document
from tests.support.clocks import START
from tests.support.examples import examples
from trainmedic_server.domain.run import Controls
from trainmedic_server.ports.outside import Presence

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    """A server in a thread of its own, since the client of this test is not asynchronous."""
    started: Future[Address] = Future()
    stop: Future[None] = Future()

    async def run() -> None:
        world = World()
        world.bus.present = [Presence("llm-1", START, {"ranks": 8})]
        world.engine.controls = Controls(breaker_open=True)
        async with world.served() as address:
            started.set_result(address)
            await asyncio.wrap_future(stop)

    thread = threading.Thread(daemon=True, target=asyncio.run, args=(run(),))
    thread.start()
    yield started.result(30)
    stop.set_result(None)
    thread.join(30)


LONGEST_HEAD = 32 * 1024

# /events does not end, so that no client which waits for the whole answer can call it.
schema = schemathesis.openapi.from_dict(openapi_document()).exclude(path="/events")
# Boundary values are made by each worker when it collects the tests: they are left to the rest.
schema.config.phases.coverage.enabled = parts.selected is not parts.Part.QUICK


@schema.parametrize()
@settings(
    max_examples=examples(25, are_random=False),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_declared(case: schemathesis.Case, address: Address) -> None:
    """Status, media type, headers and body match the document, for valid and invalid requests."""
    response = case.call(base_url=address.url)
    if response.status_code in (414, 431):  # not an operation's: the head is longer than any may be
        assert len(str(response.request.url)) > LONGEST_HEAD / 2
        return
    case.validate_response(response, checks=CHECKS)


@pytest.mark.parametrize("path", [path for path in openapi_document()["paths"] if "{job}" in path or "{node}" in path])
def test_a_path_with_a_name_declares_404(path: str) -> None:
    """A name with a line feed matches no path."""
    for method, operation in openapi_document()["paths"][path].items():
        assert "404" in operation["responses"], f"{method} {path}"
