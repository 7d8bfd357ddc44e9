"""``GET /findings``, the findings behind a run, and the jobs that are kept."""

from __future__ import annotations

import csv
import io
import json

import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import at, closed, heard
from tests.contract.test_findings import EVERYTHING, finding
from tests.support.api_world import World
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import CLAIMED_JOB, Excerpt
from trainmedic_logs.domain.known_finding import EpisodeKey, FindingAlert, KnownExcerpt
from trainmedic_server.domain.alert import Alert, AlertRecord, AlertStatus
from trainmedic_server.ports.store import RunRecord


async def with_findings() -> World:
    """With three findings; the first has an excerpt."""
    world = World()
    excerpt = Excerpt(("before", "\x1b[31mCUDA out of memory", "after"), 1, 40)

    def work(tx):  # type: ignore[no-untyped-def]
        tx.findings.save([EVERYTHING, finding("0002", 1), finding("0003", 2, is_suspected=True)])
        key = EpisodeKey("node-2", "e")
        tx.findings.save_excerpts([KnownExcerpt("0001", key, "kernel", "/dev/kmsg", None, at(0), excerpt)])

    await world.findings.transact(work)
    return world


async def test_findings_are_paged_newest_first() -> None:
    """As the history is."""
    world = await with_findings()
    async with world.client() as client:
        first = (await client.get("/findings?limit=2")).json()
        second = (await client.get("/findings", params={"limit": 2, "cursor": first["next"]})).json()
    assert [item["id"] for item in first["items"] + second["items"]] == ["0003", "0002", "0001"]
    assert second["next"] is None


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("job=job-0002", ["0002"]),
        ("node=node-2", ["0001"]),
        ("rule=gpu-xid", ["0001"]),
        ("role=root", ["0003", "0002", "0001"]),
        ("suspected=true", ["0003", "0001"]),
        ("open=false", ["0001"]),
        ("since=" + at(1.5).isoformat().replace("+00:00", "Z"), ["0003", "0001"]),
    ],
)
async def test_findings_are_filtered(query: str, ids: list[str]) -> None:
    """By each filter."""
    world = await with_findings()
    async with world.client() as client:
        answer = await client.get(f"/findings?{query}")
    assert [item["id"] for item in answer.json()["items"]] == ids, answer.text


@pytest.mark.parametrize("query", ["role=guilty", "since=yesterday", "limit=0", "cursor=x", "suspected=maybe"])
async def test_a_wrong_filter_is_told(query: str) -> None:
    """It is no empty page."""
    async with World().client() as client:
        assert (await client.get(f"/findings?{query}")).status_code == 422


async def test_all_of_them_come_as_one_stream() -> None:
    """NDJSON and CSV, by the same filters, however small a page is."""
    world = await with_findings()
    async with world.client() as client:
        items = (await client.get("/findings")).json()["items"]
        lines = await client.get("/findings?limit=1", headers={"Accept": "application/x-ndjson"})
        sheet = await client.get("/findings?job=job-0002", headers={"Accept": "text/csv"})
        none = await client.get("/findings?job=nobody", headers={"Accept": "text/csv"})
    assert [json.loads(line) for line in lines.text.splitlines()] == items
    assert lines.headers["content-type"].startswith("application/x-ndjson")
    (row,) = csv.DictReader(io.StringIO(sheet.text))
    assert (row["id"], row["job"], row["suspected"]) == ("0002", "job-0002", "false")
    assert json.loads(row["labels"]) == items[1]["labels"]
    assert list(csv.reader(io.StringIO(none.text))) == [list(items[0])]


async def test_one_finding_is_shown_with_the_lines_around_it() -> None:
    """All that is known of it, in ASCII."""
    world = await with_findings()
    async with world.client() as client:
        answer = await client.get("/findings/0001")
        shown = answer.json()
        assert (await client.get("/findings/0009")).status_code == 404
    assert shown["excerpts"][0]["lines"] == ["before", "\x1b[31mCUDA out of memory", "after"]
    assert (shown["excerpts"][0]["at"], shown["excerpts"][0]["number"]) == (1, 40)
    assert shown["target"] == "gpu:node-2/GPU-5f3a"
    assert shown["ranks"] == "0-2,511"
    assert shown["alert"]["labels"] == {"alertname": "GPUXidLogged"}
    assert (shown["open"], shown["ended_because"], shown["kept"]) == (False, "boot", False)
    assert answer.content.isascii()


async def test_a_run_shows_the_finding_behind_it() -> None:
    """With the lines around it. A finding of an earlier alert with its labels is another's, unless the run has both."""
    world = await with_findings()
    labels = {"alertname": "A", "source": "log"}
    alert = Alert("f7", AlertStatus.FIRING, labels, {}, at(60))
    mine = finding("0007", 7, alert=FindingAlert(labels, "f7", at(60)))
    earlier = replace(mine, id="0006", alert=FindingAlert(labels, "f7", at(0)), ended_at=at(1))
    excerpt = KnownExcerpt("0007", EpisodeKey("n", "e"), "training", "/log", 3, at(0), Excerpt(("line",), 0))

    def work(tx):  # type: ignore[no-untyped-def]
        tx.findings.save([mine, earlier])
        tx.findings.save_excerpts([excerpt])

    await world.findings.transact(work)
    run, other = closed(), closed()
    world.history.records[run.id] = RunRecord(run, (AlertRecord(alert, at(0), at(0)),), ())
    async with world.client() as client:
        shown = (await client.get(f"/history/{run.id}")).json()["findings"]
        world.history.records[other.id] = RunRecord(other, (heard(),), ())
        assert (await client.get(f"/history/{other.id}")).json()["findings"] == []
        both = [AlertRecord(replace(alert, starts_at=begin), at(0), at(0)) for begin in (at(0), at(60))]
        world.history.records[other.id] = RunRecord(other, tuple(both), ())
        of_both = (await client.get(f"/history/{other.id}")).json()["findings"]
    assert [each["id"] for each in of_both] == ["0006", "0007"]
    assert [(each["id"], each["excerpt"]["lines"], each["excerpt"]["rank"]) for each in shown] == [
        ("0007", ["line"], 3)
    ]


async def test_a_job_is_kept_and_released() -> None:
    """The whole of it, and single attempts; who did it is on record."""
    world = World()
    async with world.client() as client:
        kept = await client.post("/jobs/team/llm-1/keep", json={"note": " for the vendor "})
        assert kept.status_code == 200, kept.text
        assert {name: kept.json()[name] for name in ("job", "attempt", "by", "note")} == {
            "job": "team/llm-1",
            "attempt": None,
            "by": "anonymous",
            "note": "for the vendor",
        }
        await client.post("/jobs/team/llm-1/keep", json={"attempt": 3})
        listed = (await client.get("/kept")).json()["items"]
        assert [(each["job"], each["attempt"]) for each in listed] == [("team/llm-1", None), ("team/llm-1", 3)]
        released = await client.post("/jobs/team/llm-1/release")
        assert [each["attempt"] for each in released.json()["items"]] == [3]
        assert (await client.post("/jobs/team/llm-1/release")).status_code == 404
        unstorable = await client.post("/jobs/llm%00/release")
        assert (unstorable.status_code, unstorable.json()["detail"]) == (404, "No job can have that name.")
    events = await world.findings.events_after(0, 10)
    assert [(event.kind, event.actor) for event in events] == [
        ("job_kept", "anonymous"),
        ("job_kept", "anonymous"),
        ("job_released", "anonymous"),
    ]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/jobs/llm-1/keep", {"attempt": 0}, 422),
        ("/jobs/llm-1/keep", {"attempt": "3"}, 422),
        ("/jobs/llm-1/keep", {"note": "x" * 501}, 422),
        ("/jobs/llm%201/keep", {}, 404),
        ("/jobs/llm-1/release", {"attempt": 2.5}, 422),
    ],
)
async def test_what_nobody_can_keep_is_refused(path: str, body: dict[str, object], status: int) -> None:
    """With the reason."""
    async with World().client() as client:
        assert (await client.post(path, json=body)).status_code == status


async def test_a_claimed_job_is_told_apart_from_a_known_one() -> None:
    """By a member of its own; the alert alone has it as a label."""
    world = World()
    node = Target(TargetKind.NODE, "node-1")
    labels = {CLAIMED_JOB: "llm-9", "kind": "x"}
    claimed = finding("0004", target=node, labels=labels, is_printed=True)
    claimed = replace(claimed, origin=replace(claimed.origin, job=None))
    await world.findings.transact(lambda tx: tx.findings.save([claimed, finding("0005", target=node)]))
    async with world.client() as client:
        [item] = (await client.get("/findings?claimed_job=llm-9")).json()["items"]
        others = [
            (await client.get(f"/findings?{query}")).json()["items"] for query in ("job=llm-9", "claimed_job=llm")
        ]
    assert (item["id"], item["job"], item["claimed_job"], item["labels"]) == ("0004", None, "llm-9", {"kind": "x"})
    assert others == [[], []]
