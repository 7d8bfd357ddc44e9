"""A token that is bounded to jobs reads the findings and the history of its own jobs, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import httpx
from msgspec.structs import replace

from tests.contract.run_store_values import at
from tests.contract.test_findings import finding
from tests.support.api_world import World
from tests.unit.server.test_api_history import run
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import CLAIMED_JOB, Excerpt
from trainmedic_logs.domain.known_finding import EpisodeKey, KnownExcerpt
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.ports.store import RunRecord

SECRET = "the line of beta"
_BETAS = "0002"

_OF_OTHERS = (
    "/jobs/beta-1/findings",
    f"/jobs/beta-1/findings/{_BETAS}",
    "/jobs/beta-1/history",
    "/jobs/beta-1/history/run-1-beta-1",
    "/jobs/beta-1/diagnosis",
    "/jobs/beta-1/report",
    "/jobs/beta-1/logs",
    "/jobs/beta-1/logs?follow=true",
    # a name of its own in front of, behind or around another one
    "/jobs/beta-1/findings/alpha-1/findings",
    "/jobs/x/../beta-1/findings",
    "/jobs/%2e%2e/beta-1/findings",
    "/jobs/beta-1%2Falpha-1/findings",
    # lists of all
    "/findings",
    "/findings?job=alpha-1",
    "/findings?claimed_job=alpha-1",
    f"/findings/{_BETAS}",
    "/findings/0010",
    "/history",
    "/history?job=alpha-1",
    "/history?by=alpha",
    "/history/run-0-alpha-1",
    "/events",
    "/events?after=0",
    "/events?run_id=run-0-alpha-1",
    "/jobs",
    "/jobs?name=alpha-1",
    "/agents",
    "/alerts",
    "/audit",
    "/audit?by=alpha",
    "/now",
    "/kept",
    "/report",
    "/approvals",
)
_IDS_OF_OTHERS = (
    f"/jobs/alpha-1/findings/{_BETAS}",
    "/jobs/alpha-1/findings/0003",
    "/jobs/alpha-1/findings/there-is-none",
    "/jobs/alpha-1/history/run-1-beta-1",
    "/jobs/alpha-1/history/run-3-alpha-2",
    "/jobs/alpha-1/history/run-of-node",
    "/jobs/alpha-1/history/run-",
    "/jobs/alpha-1/history/beta-1",
)


def token(name: str, secret: str, jobs: tuple[str, ...] | None, *roles: TokenRole) -> Token:
    return Token(name, hashlib.sha256(secret.encode()).digest(), frozenset(roles), jobs)


async def a_world() -> World:
    """Jobs of two tenants, a finding that only claims a job of alpha's, and one of a node."""
    world = World(
        auth=Authenticator(
            [
                token("alpha", "a", ("alpha-*",), TokenRole.VIEWER, TokenRole.OPERATOR),
                token("all", "v", None, TokenRole.VIEWER),
            ]
        )
    )
    alphas = [
        finding(f"00{number}", number, rule=f"rule-{number}", target=_job("alpha-1"), line="of alpha")
        for number in (10, 11, 12)
    ]
    betas = finding(_BETAS, 2, target=_job("beta-1"), line=SECRET)
    node = Target(TargetKind.NODE, "node-1")
    claimed = finding("0003", 3, target=node, line=SECRET, labels={CLAIMED_JOB: "alpha-1"}, is_printed=True)
    claimed = replace(claimed, origin=replace(claimed.origin, job=None))

    def work(tx):  # type: ignore[no-untyped-def]
        tx.findings.save([*alphas, betas, claimed])
        for known in (alphas[0], betas):
            lines = Excerpt(("before", known.line), 1)
            key = EpisodeKey("node-1", known.id)
            tx.findings.save_excerpts([KnownExcerpt(known.id, key, "training", "/log", 0, at(0), lines)])
        plain = {"summary": SECRET, "cause": "code", "confidence": "low", "advice": "ask", "node": None, "ranks": []}
        tx.verdicts.save([KnownVerdict("v1", "beta-1", 1, at(0), at(0), "code", "low", None, "f", plain)])

    await world.findings.transact(work)
    for number, job in enumerate(("alpha-1", "beta-1", "alpha-1", "alpha-2")):
        made = run(number, id=f"run-{number}-{job}", target=_job(job), message=SECRET if "beta" in job else "own")
        world.history.records[made.id] = RunRecord(made, (), ())
    on_node = run(9, id="run-of-node", target=node, message=SECRET)
    world.history.records[on_node.id] = RunRecord(on_node, (), ())
    world.history.append("run_started", "run-1-beta-1", text=SECRET)
    world.logs.lines = []
    return world


def _job(name: str) -> Target:
    return Target(TargetKind.JOB, job=name)


async def asked(path: str, secret: str = "a", **params: object) -> httpx.Response:
    async with (await a_world()).client() as client:
        return await client.get(path, params=params, headers={"Authorization": f"Bearer {secret}"})  # type: ignore[arg-type]


async def asked_all(paths: Iterable[str]) -> list[httpx.Response]:
    async with (await a_world()).client() as client:
        return [await client.get(path, headers={"Authorization": "Bearer a"}) for path in paths]


async def test_its_own_findings_are_read_page_by_page() -> None:
    """What a file only claims is none of them."""
    first = (await asked("/jobs/alpha-1/findings", limit=2)).json()
    second = (await asked("/jobs/alpha-1/findings", limit=2, cursor=first["next"])).json()
    assert [item["id"] for item in first["items"] + second["items"]] == ["0012", "0011", "0010"]
    assert second["next"] is None
    one = (await asked("/jobs/alpha-1/findings/0010")).json()
    assert one["excerpts"][0]["lines"] == ["before", "of alpha"]


async def test_its_own_history_is_read() -> None:
    """The list, and one run in full."""
    page = (await asked("/jobs/alpha-1/history")).json()
    assert [item["run_id"] for item in page["items"]] == ["run-2-alpha-1", "run-0-alpha-1"]
    assert (await asked("/jobs/alpha-1/history/run-0-alpha-1")).json()["message"] == "own"


async def test_nothing_else_is_read() -> None:
    """By no path, filter, page or stream; the answer does not depend on what there is."""
    answers = dict(zip(_OF_OTHERS, await asked_all(_OF_OTHERS), strict=True))
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(_OF_OTHERS, 403)
    assert [path for path, answer in answers.items() if SECRET in answer.text] == []


async def test_another_ones_id_is_as_one_that_does_not_exist() -> None:
    """Also a part of one, which elsewhere names a run, or lists those that it could mean."""
    for path, answer in zip(_IDS_OF_OTHERS, await asked_all(_IDS_OF_OTHERS), strict=True):
        named, between = path.rsplit("/", 1)[-1], "of" if "findings" in path else "on"
        assert answer.status_code == 404, path
        assert answer.json()["detail"].endswith(f" {named} {between} alpha-1.")


async def test_no_filter_widens_what_is_its_own() -> None:
    """They narrow it, or are refused."""
    queries = ("job=beta-1", "target=job:beta-1", "node=node-1", "claimed_job=alpha-1", "job=alpha-1&job=beta-1")
    paths = [f"/jobs/alpha-1/{listed}?{query}" for listed in ("findings", "history") for query in queries]
    for path, answer in zip(paths, await asked_all(paths), strict=True):
        assert SECRET not in answer.text
        if "?node=" not in path:
            assert answer.status_code == 422, path
            continue
        assert answer.status_code == 200, path
        assert {item["job"] for item in answer.json()["items"]} <= {"alpha-1"}


async def test_a_cursor_of_a_larger_list_shows_nothing_more() -> None:
    """It says where to begin, and not whose items are meant."""
    cursor = (await asked("/findings", "v", limit=1)).json()["next"]
    page = (await asked("/jobs/alpha-1/findings", cursor=cursor)).json()
    assert {item["job"] for item in page["items"]} <= {"alpha-1"}


async def test_streams_of_all_items_are_refused_in_every_form() -> None:
    """Also as NDJSON and CSV; and its own list is a page, whatever form is asked for."""
    async with (await a_world()).client() as client:
        for kind in ("application/x-ndjson", "text/csv", "text/event-stream"):
            headers = {"Authorization": "Bearer a", "Accept": kind}
            for path in ("/findings", "/history", "/events"):
                assert (await client.get(path, headers=headers)).status_code == 403
            own = await client.get("/jobs/alpha-1/findings", headers=headers)
            assert SECRET not in own.text


async def test_metrics_name_no_job() -> None:
    """They are for everybody."""
    answer = await asked("/metrics")
    assert answer.status_code == 200
    assert "alpha-1" not in answer.text
    assert "beta-1" not in answer.text


async def test_who_is_not_bounded_reads_all_jobs() -> None:
    """By the same paths."""
    assert (await asked("/jobs/beta-1/findings", "v")).json()["items"][0]["line"] == SECRET
    assert (await asked("/jobs/beta-1/history/run-1-beta-1", "v")).json()["message"] == SECRET
