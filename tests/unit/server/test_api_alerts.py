"""``GET /alerts``: every alert that was heard, and what was made of it."""

from __future__ import annotations

import csv
import json

import pytest
from msgspec.structs import replace

from tests.contract.test_heard_alerts import MISSED, STARTED, alert
from tests.support.api_world import World
from trainmedic_server.domain.reaction import NoReaction, Reaction
from trainmedic_server.http.limits import ServerLimits


async def with_alerts(**options: ServerLimits) -> World:
    """With one that a run was started for, one that a matcher kept out, and one that no playbook names."""
    world = World(**options)  # type: ignore[arg-type]
    records = [
        alert(0, {"node": "n1"}, STARTED),
        alert(1, {"node": "n2"}, MISSED),
        alert(2, {"alertname": "GPUHit"}),
    ]
    await world.findings.transact(lambda tx: tx.save_alerts(records))
    return world


async def test_each_alert_says_what_became_of_it() -> None:
    """With the run, or with the first reason of each playbook, or with the alertname that was perhaps meant."""
    world = await with_alerts()
    async with world.client() as client:
        answer = (await client.get("/alerts")).json()
    assert answer["next"] is None
    unknown, missed, started = answer["items"]
    assert (started["reacted"], started["reason"]) == (True, "")
    reaction = {"playbook": "cool", "decision": "started", "reason": "", "run_id": "run-1", "run_status": None}
    assert started["reactions"] == [reaction]
    assert (missed["alert_name"], missed["status"], missed["count"]) == ("A1", "firing", 1)
    assert missed["reason"] == "cool: 'severity' is '' and must match warning|critical"
    assert (unknown["reactions"], unknown["reacted"]) == ([], False)
    assert unknown["reason"] == "no playbook reacts to 'GPUHit'; did you mean 'GPUHot'?"


async def test_an_alert_that_a_playbook_names_by_now_says_so() -> None:
    """What was decided then is not what would be decided now."""
    world = World()
    records = [alert(0, {"alertname": "GPUHot"}), alert(1, {"alertname": ""})]
    await world.findings.transact(lambda tx: tx.save_alerts(records))
    async with world.client() as client:
        nameless, named = (await client.get("/alerts")).json()["items"]
    assert named["reason"] == "no playbook reacted to 'GPUHot' when it was received; one does now"
    assert nameless["reason"] == "it has no alertname, which playbooks match"


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("reacted=false", ["GPUHit", "A1"]),
        ("alertname=A1", ["A1"]),
        ("label=node%3Dn1", ["A0"]),
        ("label=node%3Dn1&label=alertname%3DA1", []),
        ("status=resolved", []),
        ("since=2000-01-01T00:00:00Z&until=1999-01-01T00:00:00Z", []),
    ],
)
async def test_alerts_are_filtered(query: str, names: list[str]) -> None:
    """By each filter; several labels must all hold."""
    world = await with_alerts()
    async with world.client() as client:
        answer = await client.get(f"/alerts?{query}")
    assert [item["alert_name"] for item in answer.json()["items"]] == names, answer.text


@pytest.mark.parametrize(
    "query", ["label=node", "label=%3Dx", "label=a%3D1&label=a%3D2", "status=gone", "reacted=perhaps", "cursor=x"]
)
async def test_a_wrong_filter_is_told(query: str) -> None:
    """It is no empty page."""
    async with World().client() as client:
        assert (await client.get(f"/alerts?{query}")).status_code == 422


async def test_a_page_of_large_alerts_ends_early() -> None:
    """It has at least one piece, and the cursor of the next."""
    world = World(limits=ServerLimits(page_bytes=1000))
    records = [alert(number, {"text": "x" * 100}) for number in range(150)]
    await world.findings.transact(lambda tx: tx.save_alerts(records))
    async with world.client() as client:
        first = (await client.get("/alerts?limit=1000")).json()
        second = (await client.get("/alerts", params={"limit": 1000, "cursor": first["next"]})).json()
    assert (len(first["items"]), len(second["items"]), second["next"]) == (100, 50, None)


def test_a_reason_is_bounded() -> None:
    """It may quote a label's value, of which there may be much."""
    assert len(Reaction("cool", NoReaction.NOT_MATCHED, "x" * 70_000).reason) == 500


async def test_all_that_match_come_as_one_stream() -> None:
    """More than a page has, one a line; in CSV labels and reactions are JSON in a cell."""
    world = World()
    many = [alert(number, {"node": f"n{number}"}) for number in range(120)]
    await world.findings.transact(lambda tx: tx.save_alerts(many))
    async with world.client() as client:
        lines = (await client.get("/alerts", headers={"Accept": "application/x-ndjson"})).text.splitlines()
        table = (await client.get("/alerts?label=node%3Dn7", headers={"Accept": "text/csv"})).text.splitlines()
    assert [json.loads(line)["labels"]["node"] for line in lines] == [f"n{number}" for number in range(119, -1, -1)]
    header, row = csv.reader(table)
    shown = dict(zip(header, row, strict=True))
    assert (json.loads(shown["labels"])["node"], json.loads(shown["reactions"]), shown["reacted"]) == (
        "n7",
        [],
        "false",
    )


async def test_a_mapped_alert_shows_what_was_sent() -> None:
    """In the API, and on the console's page; ``why`` there asks about the alert as it was sent."""
    world = World()
    sent = {"alertname": "CardHot", "card": "4"}
    record = alert(0, {"alertname": "GPUHot", "card": "4", "gpu": "4"}, MISSED)
    plain = alert(1, {"alertname": "GPUHot"}, MISSED)
    refused = alert(2, {"alertname": "Else"}, Reaction("", "not_accepted", "'site' is 'b' and must be 'a' (map.yaml)"))
    records = [replace(record, alert=replace(record.alert, original=sent)), plain, refused]
    await world.findings.transact(lambda tx: tx.save_alerts(records))
    async with world.client() as client:
        items = (await client.get("/alerts")).json()["items"]
        page = (await client.get("/alerts?each=true", headers={"Accept": "text/html"})).text
    assert [(item["original_alert_name"], item["original_labels"]) for item in items] == [
        (None, None), (None, None), ("CardHot", sent)
    ]  # fmt: skip
    assert items[0]["reason"] == "not accepted by the alert map: 'site' is 'b' and must be 'a' (map.yaml)"
    assert (items[0]["reacted"], items[0]["suggestion"]) == (False, None)
    assert "from CardHot" in page
    assert "/explain?alertname=CardHot&amp;labels=card%3D4+" in page


async def test_an_alert_given_as_it_was_heard_is_explained_as_it_was_sent() -> None:
    """The map in force is applied to that, not to what an earlier one made of it."""
    world = World()
    heard = {"labels": {"alertname": "GPUHot"}, "original_labels": {"alertname": "CardHot", "card": "4"}}
    async with world.client() as client:
        await client.post("/explain", json=heard)
        await client.post("/explain", json={"alert_labels": {"alertname": "GPUHot"}, "original_labels": None})
    assert [given.labels for given, _ in world.engine.explained] == [
        {"alertname": "CardHot", "card": "4"}, {"alertname": "GPUHot"}
    ]  # fmt: skip
