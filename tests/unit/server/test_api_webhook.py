"""``POST /webhook``, without a socket."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.api_world import World, alert, logged, payload
from trainmedic_core.fingerprint import fingerprint
from trainmedic_server import errors
from trainmedic_server.api import webhook
from trainmedic_server.api.schemas import WebhookReply
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.http.limits import ServerLimits


async def post(world: World, body: Any, **headers: str) -> Any:
    async with world.client() as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post("/webhook", content=content, headers=headers)


def outcome(world: World, name: str) -> float | None:
    return world.metrics.registry.get_sample_value("trainmedic_deliveries_total", {"outcome": name})


def refused(world: World) -> dict[str, float]:
    """How many deliveries were refused, by reason."""
    samples = (sample for metric in world.metrics.registry.collect() for sample in metric.samples)
    return {
        sample.labels["reason"]: sample.value
        for sample in samples
        if sample.name == "trainmedic_refused_deliveries_total" and sample.value
    }


async def test_the_reply_is_the_contract() -> None:
    """200 with exactly the promised members, as the documented model has them."""
    world = World()
    answer = await post(world, payload(alert(), alert(labels={"alertname": "x"}), truncatedAlerts=2))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == [
        *("delivery_id", "alerts", "runs", "duplicates", "unmatched", "truncated"),
        *("rejected", "rejected_total", "ignored"),
    ]
    assert (body["rejected"], body["rejected_total"], body["ignored"]) == ([], 0, [])
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
    assert refused(world) == {"unauthorized": 1}


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
    assert [each["index"] for each in answer.json()["rejected"]] == [20]


async def test_the_reply_lists_malformed_alerts_with_their_reasons() -> None:
    """At most 20 of them, with how many there are; the others of the group are decided on."""
    world = World()
    ended = alert(status="resolved", labels={"alertname": "Long", "path": "p" * 70_000})
    bad = [alert(labels={"alertname": "Odd", "gpu": number}) for number in range(30)]
    answer = await post(world, payload(ended, alert(), *bad, receiver=7))
    assert answer.status_code == 200
    body = answer.json()
    WebhookReply.model_validate(body)
    assert (body["alerts"], body["rejected_total"], len(body["rejected"]), len(body["runs"])) == (32, 31, 20, 1)
    assert body["rejected"][0] == {
        "index": 0,
        "alert_name": "Long",
        "fingerprint": "c6eadffa33fcdf37",
        "reason": "alerts.0.labels.path: has 70000 characters; at most 65536 are accepted",
        "end_taken": True,
    }
    assert body["rejected"][1]["end_taken"] is False
    assert body["ignored"] == [{"field": "receiver", "message": "must be a string"}]


async def test_a_delivery_of_malformed_alerts_alone_is_refused_with_the_field() -> None:
    """Nothing in it could be taken, and Alertmanager's log shows the reason."""
    world = World()
    answer = await post(world, payload(alert(labels={"gpu": 1}), alert(startsAt="noon")))
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["errors"]] == ["alerts.0.labels.gpu", "alerts.1.startsAt"]
    assert refused(world) == {"unreadable": 1}


@pytest.mark.parametrize("escape", ["\\ud83d", "\\udc00 and \\u0000"])
async def test_half_a_surrogate_pair_costs_no_group_its_alerts(escape: str) -> None:
    """In an annotation it is replaced; in a label it rejects its own alert."""
    text = json.dumps(payload(alert(annotations={"line": "HERE"}), alert(labels={"alertname": "x", "l": "HERE"})))
    world = World()
    answer = await post(world, text.replace("HERE", escape).encode())
    assert answer.status_code == 200
    assert [each["index"] for each in answer.json()["rejected"]] == [1]
    (taken,) = world.engine.deliveries[0].alerts
    assert "\ufffd" in taken.annotations["line"]


async def test_a_body_with_half_a_pair_that_is_no_json_is_400() -> None:
    """Neither a number that JSON does not have, nor what is cut off, is taken with it."""
    for body in (b'{"a": "\\ud83d", "b": NaN}', b'{"a": "\\ud83d"'):
        assert (await post(World(), body)).status_code == 400


@pytest.mark.parametrize("path", ["/webhook/", "//webhook", "/webhook//", "/webhook?from=am", "/webhook/?from=am"])
async def test_slashes_around_the_path_lose_no_alert(path: str) -> None:
    """A URL that ends in a slash, or was put together with one too many, is the webhook all the same."""
    world = World()
    async with world.client() as client:
        answer = await client.post(f"http://{client.base_url.host}{path}", json=payload())
    assert (answer.status_code, len(world.engine.deliveries)) == (200, 1)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/webhook", 405), ("GET", "/webhook/", 404), ("PUT", "/webhook", 405), ("POST", "/webhooks", 404),
     ("POST", "/web/hook", 404), ("POST", "/", 404), ("POST", "/webhook/x", 404), ("POST", "/ready/", 404)],
)  # fmt: skip
async def test_other_methods_and_paths_keep_their_answers(method: str, path: str, status: int) -> None:
    """Only a POST, and only to this path."""
    async with World().client() as client:
        assert (await client.request(method, path, json=payload())).status_code == status


@pytest.mark.parametrize(
    ("token", "body", "reason"),
    [("", b"{}", "unauthorized"), ("look", b"{}", "forbidden"), ("hook", b"{}", "unreadable"),
     ("hook", b"[", "unreadable"), ("hook", b" " * 2_000, "too_large")],
)  # fmt: skip
async def test_refused_deliveries_are_counted_by_reason(token: str, body: bytes, reason: str) -> None:
    """So that an alert can tell a wrong token from a body that is none."""
    tokens = [
        Token("am", hashlib.sha256(b"hook").digest(), frozenset({TokenRole.WEBHOOK})),
        Token("ann", hashlib.sha256(b"look").digest(), frozenset({TokenRole.VIEWER})),
    ]
    world = World(auth=Authenticator(tokens), limits=ServerLimits(body_bytes=1_024))
    answer = await post(world, body, **({"authorization": f"Bearer {token}"} if token else {}))
    assert 400 <= answer.status_code < 500
    assert refused(world) == {reason: 1}
    assert outcome(world, "refused") == 1


def test_an_alert_cannot_pass_for_the_time_of_a_schedule() -> None:
    """Its fingerprint is then computed from its labels."""
    labels = {"alertname": "schedule:nightly"}
    entry = {
        "status": "firing",
        "labels": labels,
        "startsAt": "2026-01-01T00:00:00Z",
        "fingerprint": "schedule-nightly",
    }
    body = bytearray(json.dumps({"version": "4", "alerts": [entry]}).encode())
    delivery = webhook._parse_alertmanager(body, datetime(2026, 1, 1, tzinfo=UTC))
    assert [each.fingerprint for each in delivery.alerts] == [fingerprint(labels)]
