"""``POST /webhook``, without a socket."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest

from tests.support.api_world import World, alert, logged, payload
from trainmedic_server import errors
from trainmedic_server.server.auth import Authenticator
from trainmedic_server.server.limits import ServerLimits
from trainmedic_server.server.schemas import WebhookReply
from trainmedic_server.server.tokens import Token, TokenRole


async def post(world: World, body: Any, **headers: str) -> Any:
    async with world.client() as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post("/webhook", content=content, headers=headers)


def outcome(world: World, name: str) -> float | None:
    return world.metrics.registry.get_sample_value("trainmedic_deliveries_total", {"outcome": name})


async def test_the_reply_is_the_contract() -> None:
    """200 with exactly the promised members, as the documented model has them."""
    world = World()
    answer = await post(world, payload(alert(), alert(labels={"alertname": "x"}), truncatedAlerts=2))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["delivery_id", "alerts", "runs", "duplicates", "unmatched", "truncated"]
    assert (body["alerts"], body["duplicates"], body["unmatched"], body["truncated"]) == (2, 0, 1, 2)
    (run,) = body["runs"]
    assert list(run) == ["run_id", "playbook", "target", "decision"]
    assert (run["playbook"], run["target"], run["decision"]) == ("cool", "node:node-1", "started")
    WebhookReply.model_validate(body)
    assert outcome(world, "accepted") == 1


async def test_the_content_type_does_not_matter() -> None:
    """A body that is Alertmanager's is taken, whatever curl said that it is."""
    answer = await post(World(), payload(), **{"content-type": "application/x-www-form-urlencoded"})
    assert answer.status_code == 200


@pytest.mark.parametrize("error", [errors.Saturated("full", 7), errors.StoreUnavailable("disk I/O error at /db")])
async def test_what_a_retry_can_help_is_503_with_retry_after(error: Exception) -> None:
    """Alertmanager retries 5xx only; nothing of the cause is told."""
    world = World()
    world.engine.fails_with = error
    answer = await post(world, payload())
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["content-type"] == "application/problem+json"
    assert "disk" not in answer.text
    assert outcome(world, "unavailable") == 1


async def test_an_unexpected_error_is_500_and_says_nothing() -> None:
    """The log has what happened; the client has a problem without internals."""
    world = World()
    world.engine.fails_with = RuntimeError("password=hunter2")
    with logged() as lines:
        answer = await post(world, payload())
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "hunter2" not in answer.text
    assert "Traceback" not in answer.text
    assert outcome(world, "failed") == 1
    assert world.metrics.registry.get_sample_value("trainmedic_loop_errors_total", {"loop": "http"}) == 1
    (line,) = [line for line in lines() if line["level"] == "error"]
    assert (line["event"], line["path"]) == ("request failed", "/webhook")


async def test_a_token_is_asked_before_the_body_is_looked_at() -> None:
    """Nobody without one learns what a good body is, or has one parsed."""
    authenticator = Authenticator([Token("am", hashlib.sha256(b"hook").digest(), frozenset({TokenRole.WEBHOOK}))])
    world = World(auth=authenticator)
    answer = await post(world, b"not json")
    assert answer.status_code == 401
    assert "Basic" in answer.headers["www-authenticate"]
    assert (await post(world, payload(), authorization="Bearer hook")).status_code == 200
    assert outcome(world, "refused") == 1


async def test_secrets_are_not_logged() -> None:
    """Neither a wrong token nor a body reaches the log."""
    authenticator = Authenticator([Token("am", hashlib.sha256(b"hook").digest(), frozenset({TokenRole.WEBHOOK}))])
    with logged() as lines:
        await post(World(auth=authenticator), payload(), authorization="Bearer s3cr3t-token")
        await post(World(), payload(alert(startsAt="s3cr3t-body")))
    assert [line["status"] for line in lines()] == [401, 422]
    assert "s3cr3t" not in str(lines())


async def test_bodies_in_work_are_bounded_together() -> None:
    """More than the server sets aside for them is 503, and taken again once others are done."""
    world = World(limits=ServerLimits(small_bytes=1500))
    deciding, release = asyncio.Event(), asyncio.Event()
    real = world.engine.admit

    async def slow(delivery: Any) -> Any:
        deciding.set()
        await release.wait()
        return await real(delivery)

    world.engine.admit = slow  # type: ignore[method-assign]
    async with world.client() as client:
        body = json.dumps(payload()) + " " * 400
        first = asyncio.create_task(client.post("/webhook", content=body))
        await deciding.wait()
        second = await client.post("/webhook", content=body)
        release.set()
        assert (second.status_code, (await first).status_code) == (503, 200)
        assert (await client.post("/webhook", content=body)).status_code == 200


async def test_a_large_body_is_read_in_a_thread_with_the_same_outcome() -> None:
    """Size changes where the work is done, not what comes of it."""
    world = World()
    filler = {"annotations": {"text": "x" * 60_000}}
    answer = await post(world, payload(*[alert(**filler) for _ in range(20)]))
    assert answer.json()["alerts"] == 20
    answer = await post(world, payload(*[alert(**filler) for _ in range(20)], alert(labels=None)))
    assert answer.json()["field"] == "alerts.20.labels"
