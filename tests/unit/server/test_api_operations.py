"""What operators do, what probes ask, and who may; without a socket."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import closed
from tests.support.api_world import World, payload
from tests.support.clocks import START, StoppedClock
from tests.support.memory_api import Problem
from trainmedic_server import __version__, errors
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.api.channels import ChannelsApi
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.run import Controls
from trainmedic_server.domain.topology import NO_SLURM, ClusterNode, SlurmTopology
from trainmedic_server.engine.service_watch import ServiceState
from trainmedic_server.ports.outside import Presence
from trainmedic_server.ports.store import RunRecord

OPERATOR = {"authorization": "Bearer op"}


def world_with_tokens() -> World:
    return World(auth=Authenticator([Token(r.value, hashlib.sha256(s).digest(), frozenset({r})) for r, s in SECRETS]))


SECRETS = [(TokenRole.WEBHOOK, b"am"), (TokenRole.VIEWER, b"look"), (TokenRole.OPERATOR, b"op")]


async def a_run(client: httpx.AsyncClient, **headers: str) -> str:
    answer = await client.post("/webhook", json=payload(), headers=headers)
    return str(answer.json()["runs"][0]["run_id"])


@pytest.mark.parametrize("kind", ["approve", "reject", "cancel", "undo"])
async def test_an_order_is_passed_on_with_its_actor_and_note(kind: str) -> None:
    """And the run as it is then comes back as an item."""
    world = world_with_tokens()
    async with world.client() as client:
        run_id = await a_run(client, authorization="Bearer am")
        answer = await client.post(f"/runs/{run_id}/{kind}", json={"note": "fan replaced"}, headers=OPERATOR)
        assert (answer.status_code, answer.json()["run_id"], answer.json()["duration_ms"]) == (200, run_id, 2000)
        shown = (await client.get(f"/history/{run_id}", headers=OPERATOR)).json()
    (order,) = shown["orders"]
    assert (order["kind"], order["actor"], order["note"]) == (kind, "operator", "fan replaced")


@pytest.mark.parametrize(("kind", "orders"), [("reject", 2), ("cancel", 2), ("approve", 1)])
async def test_reject_and_cancel_can_give_back_at_once(kind: str, orders: int) -> None:
    """By a member of the body, which means nothing to another order; and by the box in the console."""
    async with World().client() as client:
        by_api, by_form = await a_run(client), await a_run(client)
        answer = await client.post(f"/runs/{by_api}/{kind}", json={"note": "hot", "undo": True})
        assert answer.status_code == 200
        form = {"note": "hot", "undo": "1", "next": "/"}
        await client.post(f"/console/runs/{by_form}/{kind}", data=form, headers={"Sec-Fetch-Site": "same-origin"})
        for run_id in (by_api, by_form):
            shown = (await client.get(f"/history/{run_id}")).json()["orders"]
            assert [order["kind"] for order in shown] == [kind, "undo"][:orders]


async def test_an_order_that_does_not_fit_is_a_problem() -> None:
    """404 for no such run, 409 for a closed one."""
    async with World().client() as client:
        run_id = await a_run(client)
        assert (await client.post("/runs/none/cancel")).status_code == 404
        assert (await client.post(f"/runs/{run_id}/cancel")).status_code == 200
        answer = await client.post(f"/runs/{run_id}/cancel")
        assert (answer.status_code, answer.headers["content-type"]) == (409, "application/problem+json")
        assert (await client.post(f"/runs/{run_id}/explode")).status_code == 404


@pytest.mark.parametrize(
    ("content", "status", "field"),
    [
        (b"", 200, None),
        (b"  ", 200, None),
        (b"{}", 200, None),
        (b'{"note": "x", "more": 1}', 200, None),
        (b"{", 400, None),
        (b"[" * 100_000, 413, None),
        (b"[]", 422, ""),
        (b'{"note": 5}', 422, "note"),
        (b'{"note": "\\u0000"}', 422, "note"),
        (b'{"note": "' + b"x" * 2001 + b'"}', 422, "note"),
        (b"x" * 20_000, 413, None),
    ],
)
async def test_the_body_of_an_order_is_optional_and_checked(content: bytes, status: int, field: str | None) -> None:
    """With the same care as a webhook."""
    async with World().client() as client:
        answer = await client.post(f"/runs/{await a_run(client)}/cancel", content=content)
    assert answer.status_code == status
    assert answer.json().get("field") == field


async def test_pause_and_resume_turn_the_switch() -> None:
    """Resume closes the breaker only where that is asked; a colleague's maintenance pause outlasts the closing."""
    world = world_with_tokens()
    world.engine.controls = Controls(breaker_open=True)
    async with world.client() as client:
        client.headers.update(OPERATOR)
        paused = (await client.post("/pause")).json()
        assert (paused["paused"], paused["paused_by"], paused["breaker_open"]) == (True, "operator", True)
        ready = (await client.get("/ready")).json()
        assert (ready["paused"], ready["breaker_open"]) == (True, True)
        closed = (await client.post("/resume", json={"breaker": True})).json()
        assert (closed["paused"], closed["breaker_open"]) == (True, False)
        world.engine.controls = replace(world.engine.controls, breaker_open=True)
        resumed = (await client.post("/resume")).json()
        assert (resumed["paused"], resumed["breaker_open"]) == (False, True)
        await client.post("/pause", json={"node": "node-7"})
        both = (await client.post("/resume", json={"breaker": True, "node": "node-7"})).json()
        assert (both["pauses"], both["breaker_open"]) == ([], False)
        assert (await client.post("/resume", json={"breaker": "yes"})).json()["field"] == "breaker"


PATHS = [
    ("POST", "/webhook", TokenRole.WEBHOOK),
    *[("POST", f"/runs/x/{kind}", TokenRole.OPERATOR) for kind in ("approve", "reject", "cancel", "undo")],
    ("POST", "/pause", TokenRole.OPERATOR),
    ("POST", "/resume", TokenRole.OPERATOR),
    *[
        ("GET", path, TokenRole.VIEWER)
        for path in ("/history", "/history/x", "/playbooks", "/playbooks/x", "/agents", "/agents/log-cuts")
    ],
    *[("GET", path, TokenRole.VIEWER) for path in ("/jobs", "/events?after=-1")],
    *[("GET", path, None) for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json")],
]


@pytest.fixture(scope="module")
def asked_for_roles() -> World:
    """One for all paths: to build it takes longer than to ask it."""
    return world_with_tokens()


@pytest.mark.parametrize(("method", "path", "needed"), PATHS)
async def test_every_path_asks_for_its_role(
    asked_for_roles: World, method: str, path: str, needed: TokenRole | None
) -> None:
    """401 without a token, 403 with another role's; probes and documentation need none."""
    async with asked_for_roles.client() as client:
        without = (await client.request(method, path)).status_code
        assert (without == 401) is (needed is not None)
        for role, secret in SECRETS:
            answer = await client.request(method, path, headers={"authorization": f"Bearer {secret.decode()}"})
            allowed = needed in (None, role) or (needed is TokenRole.VIEWER and role is TokenRole.OPERATOR)
            assert (answer.status_code == 403) is not allowed


async def test_playbooks_are_listed_with_counts_and_load_errors() -> None:
    """A file that could not be loaded is named with its place, beside those that were."""
    world = World()
    for number in range(3):
        made = closed(number, created_at=START - timedelta(minutes=1), ended_at=START)
        world.history.records[made.id] = RunRecord(made, (), ())
    world.catalog.problems.append(Problem("playbooks/bad.yaml", 3, 7, "unknown key 'stesp'; did you mean 'steps'?"))
    async with world.client() as client:
        listed = (await client.get("/playbooks")).json()
        shown = (await client.get("/playbooks/cool")).json()
        assert (await client.get("/playbooks/none")).status_code == 404
    (item,) = listed["items"]
    assert (item["name"], item["version"], item["source"]) == ("cool", "v1", "playbooks/cool.yaml")
    assert (item["alerts"], item["runs"]) == (["GPUHot"], {"succeeded": 3})
    assert (item["last_30_days"]["started"], item["last_30_days"]["median_seconds"]) == (3, 60.0)
    assert listed["errors"][0] == {
        "file": "playbooks/bad.yaml",
        "line": 3,
        "column": 7,
        "message": "unknown key 'stesp'; did you mean 'steps'?",
    }
    assert shown == {**item, "text": "playbook: cool\n"}


@pytest.mark.parametrize("path", ["/agents", "/jobs"])
async def test_presence_is_shown_while_the_bus_answers(path: str) -> None:
    """And is 503 while it does not."""
    world = World()
    world.bus.present = [Presence("b", START, {"ranks": 8}), Presence("a", START)]
    async with world.client() as client:
        items = (await client.get(path)).json()["items"]
        assert [item["name"] for item in items] == ["a", "b"]
        assert items[1] == {"name": "b", "last_seen": "2026-01-31T12:00:00Z", "details": {"ranks": 8}}
    world = World()
    world.bus.away = errors.BusUnavailable
    async with world.client() as client:
        answer = await client.get(path)
    assert answer.status_code == 503
    assert "10.0.0.1" not in answer.text


async def test_health_says_that_the_process_lives() -> None:
    """Whatever its dependencies do."""
    world = World()
    world.store.away = errors.StoreUnavailable
    async with world.client() as client:
        health = (await client.get("/health")).json()
    assert health == {"status": "healthy", "timestamp": "2026-01-31T12:00:00Z", "version": __version__}


def breaks(part: str) -> World:
    world = World()
    match part:
        case "store":
            world.store.away = errors.StoreUnavailable
        case "redis":
            world.bus.away = errors.BusUnavailable
        case "playbooks":
            world.catalog.books.clear()
            world.catalog.problems.append(Problem("x.yaml", 1, 1, "bad"))
    return world


@pytest.mark.parametrize("broken", ["store", "redis", "playbooks", ""])
async def test_ready_has_an_entry_for_each_dependency(broken: str) -> None:
    """503 where one cannot be used, which its entry says without internals."""
    async with breaks(broken).client() as client:
        answer = await client.get("/ready")
    entries: dict[str, Any] = answer.json()
    assert answer.status_code == (503 if broken else 200)
    for name in ("store", "redis", "playbooks"):
        assert entries[name]["ok"] is (name != broken)
    assert "10.0.0.1" not in answer.text


@pytest.mark.parametrize("services", [{}, {"oncall": ["pagerduty"]}])
async def test_ready_says_whether_people_can_be_notified(services: dict[str, list[str]]) -> None:
    """It is no reason not to be ready."""
    world = World(channels=ChannelsApi(InMemoryStore(), StoppedClock(), services))
    async with world.client() as client:
        answer = await client.get("/ready")
    notifications = answer.json()["notifications"]
    assert (answer.status_code, notifications["ok"]) == (200, bool(services))
    assert notifications["detail"].startswith("no notification channel is set") is not bool(services)


@pytest.mark.parametrize("is_signed", [True, False])
async def test_ready_says_what_it_means_to_have_no_signing_key(is_signed: bool) -> None:
    """It is no reason not to be ready, and who looks is told."""
    world = World()
    world.bus.is_signed = is_signed
    async with world.client() as client:
        answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["signed"]) == (200, is_signed)
    assert (
        "anyone who can write to Redis can command agents and jobs" in answer.json()["redis"]["detail"]
    ) != is_signed


@pytest.mark.parametrize(
    ("topology", "shown"),
    [
        (None, None),
        (lambda: NO_SLURM, (True, "answers, with 0 nodes")),
        (
            lambda: SlurmTopology(answers=False),
            (False, "is being read for the first time since the server's start"),
        ),
        (lambda: SlurmTopology(nodes=[ClusterNode("n1", ())]), (True, "answers, with 1 node")),
        (
            lambda: NO_SLURM.unanswered(START),
            (False, "does not answer since 2026-01-31T12:00:00Z; the server's log has the reason"),
        ),
    ],
)
async def test_ready_says_whether_slurm_answers(topology: Any, shown: tuple[bool, str] | None) -> None:
    """It is no reason not to be ready: alerts are accepted."""
    async with World(slurm_topology=topology).client() as client:
        answer = await client.get("/ready")
    slurm = answer.json()["slurm"]
    assert (answer.status_code, slurm and (slurm["ok"], slurm["detail"])) == (200, shown)


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (None, None),
        (ServiceState("", START), (True, "not asked yet")),
        (ServiceState(None, START), (True, "answers")),
        (ServiceState("refused", START), (False, "cannot be used since 2026-01-31T12:00:00Z: refused")),
    ],
)
async def test_ready_says_whether_alertmanager_answers(
    state: ServiceState | None, shown: tuple[bool, str] | None
) -> None:
    """It is no reason not to be ready, and says nothing of Prometheus."""
    async with World(services={"alertmanager": lambda: state} if state else {}).client() as client:
        answer = await client.get("/ready")
    part = answer.json()["alertmanager"]
    assert (answer.status_code, part and (part["ok"], part["detail"])) == (200, shown)
    assert answer.json()["prometheus"] is None


@pytest.mark.parametrize("mode", list(Mode))
async def test_ready_states_the_mode(mode: Mode) -> None:
    """So that whoever probes sees whether the server may act."""
    world = World()
    world.engine.mode = mode
    async with world.client() as client:
        assert (await client.get("/ready")).json()["mode"] == mode


async def test_metrics_are_for_prometheus() -> None:
    """In the text format, and as OpenMetrics where that is asked for."""
    async with World().client() as client:
        await client.post("/webhook", json=payload())
        plain = await client.get("/metrics")
        open_metrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert 'trainmedic_deliveries_total{outcome="accepted"} 1.0' in plain.text
    assert plain.headers["content-type"].startswith("text/plain")
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/webhook", 405), ("PUT", "/history", 405), ("POST", "/history/", 404)],
)
async def test_a_wrong_path_or_method_is_a_problem_too(method: str, path: str, status: int) -> None:
    """One media type for every error."""
    async with World().client() as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert {"type", "title", "detail", "instance"} <= set(answer.json())


async def test_the_openapi_document_is_complete() -> None:
    """Every path of the contract, the webhook's body and example, problems as the media type of errors."""
    async with World().client() as client:
        document = (await client.get("/openapi.json")).json()
    paths = document["paths"]
    assert {"/webhook", "/history", "/history/{run_id}", "/events", "/playbooks", "/ready", "/metrics"} < set(paths)
    body = paths["/webhook"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["$ref"].removeprefix("#/components/schemas/") in document["components"]["schemas"]
    assert body["example"]["version"] == "4"
    for path, operations in paths.items():
        for operation in operations.values():
            assert operation["summary"]
            for code, response in operation["responses"].items():
                if int(code) >= 400 and path != "/ready":
                    assert list(response["content"]) == ["application/problem+json"]
    assert "Undefined" not in str(document)


async def test_that_a_job_was_meant_to_end_is_passed_on_with_the_actor_and_the_note() -> None:
    """Its name may have a slash."""
    world = world_with_tokens()
    async with world.client() as client:
        for job in ("llm-1", "team/llm-1"):
            answer = await client.post(f"/jobs/{job}/end", json={"note": " by scancel "}, headers=OPERATOR)
            assert answer.status_code == 200, answer.text
            assert answer.json() == {
                "name": job,
                "state": "ended",
                "since": "2026-01-31T12:00:00Z",
                "reason": "by scancel",
            }
    assert world.lives.ended == [("llm-1", "operator", "by scancel"), ("team/llm-1", "operator", "by scancel")]


async def test_only_an_operator_ends_a_job_that_is_gone_and_says_why() -> None:
    """404 for an unknown one, 409 for one that lives, 422 without a note, 403 for a viewer."""
    world = world_with_tokens()
    async with world.client() as client:

        async def status(job: str, body: Any, token: str = "op") -> int:
            headers = {"authorization": f"Bearer {token}"}
            return (await client.post(f"/jobs/{job}/end", json=body, headers=headers)).status_code

        note = {"note": "meant"}
        assert await status("llm-9", note) == 404
        assert await status("llm-2", note) == 409
        assert [await status("llm-1", body) for body in ({}, {"note": " "}, {"note": "x" * 501})] == [422] * 3
        assert await status("llm-1", note, "look") == 403
    assert world.lives.ended == []


async def test_a_playbook_is_started_by_hand_or_only_tried() -> None:
    """What a dry run would do has no run; who starts one is on record."""
    world = World()
    async with world.client() as client:
        would = await client.post("/runs", json={"playbook": "cool", "target": "gpu:node-1/0", "dry_run": True})
        assert (would.status_code, would.json()["run"], would.json()["decision"]) == (200, None, "started")
        assert world.history.records == {}
        body = {"playbook": "cool", "target": "gpu:node-1/0", "labels": {"rack": "r3"}, "key": "k1", "note": "hot"}
        made = (await client.post("/runs", json=body)).json()
        assert (made["run"]["started_by"], made["run"]["target"]) == ("anonymous", "gpu:node-1/0")
        assert (await client.post("/runs", json={**body, "playbook": "coool"})).status_code == 404
        assert (await client.post("/runs/nothing/retry")).status_code == 404


async def test_a_label_that_no_database_stores_is_refused() -> None:
    """As in a webhook's body."""
    async with World().client() as client:
        body = {"playbook": "cool", "target": "gpu:node-1/0", "labels": {"alertname": "a\0"}}
        answer = await client.post("/runs", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, "labels.alertname")


@pytest.mark.parametrize(
    "target", ["gpu:node-1", "node:", "job", "rack:r3", "cluster:x", "job:a\nb", "node:" + "x" * 513]
)
async def test_a_target_that_names_nothing_is_refused(target: str) -> None:
    """With the member that is wrong, and how one is written."""
    async with World().client() as client:
        answer = await client.post("/runs", json={"playbook": "cool", "target": target})
    assert (answer.status_code, answer.json()["field"]) == (422, "target")
