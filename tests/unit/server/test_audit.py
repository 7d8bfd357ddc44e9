"""``GET /audit``: what people did, and that a file of it cannot be changed unseen."""

from __future__ import annotations

import csv
import io
import json
from datetime import timedelta

from msgspec.structs import replace

from tests.support.api_world import World, payload
from tests.support.clocks import START
from trainmedic_server.auth.audit import line_hash
from trainmedic_server.domain.run import Event

HTML = {"accept": "text/html"}


async def world_with_acts() -> World:
    world = World()
    for number, actor in enumerate(["ann", "trainmedic", "bob", "ann"]):
        event = world.history.append("paused", None, note=f"=cmd {number}")
        world.history.events[-1] = Event(event.kind, event.at, None, actor, event.data, event.seq)
    return world


async def test_what_the_server_did_is_left_out_and_the_newest_comes_first() -> None:
    """By pages, and of one person."""
    async with (await world_with_acts()).client() as client:
        first = (await client.get("/audit?limit=2")).json()
        assert [(each["seq"], each["actor"]) for each in first["items"]] == [(4, "ann"), (3, "bob")]
        second = (await client.get(f"/audit?limit=2&before={first['next']}")).json()
        assert [each["seq"] for each in second["items"]] == [1]
        assert second["next"] is None
        assert [each["seq"] for each in (await client.get("/audit?by=ann")).json()["items"]] == [4, 1]


async def test_each_line_of_a_file_holds_the_one_before() -> None:
    """So that none can be changed, left out or put in between."""
    async with (await world_with_acts()).client() as client:
        await client.post("/webhook", json=payload())
        text = (await client.get("/audit", headers={"accept": "application/x-ndjson"})).text
    previous = "0" * 64
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 3
    for line in lines:
        told, before = line.pop("hash"), line.pop("previous")
        assert (before, told) == (previous, line_hash(previous, line))
        previous = told


async def test_a_file_begins_where_it_is_asked_to() -> None:
    """At the page of `before`; and where the store is away nothing is begun."""
    world = await world_with_acts()
    async with world.client() as client:
        text = (await client.get("/audit?before=4", headers={"accept": "application/x-ndjson"})).text
        assert [json.loads(line)["seq"] for line in text.splitlines()] == [3, 1]
        world.history.away = True
        for kind in ("application/x-ndjson", "text/csv"):
            assert (await client.get("/audit", headers={"accept": kind})).status_code == 503, kind


async def test_a_table_runs_no_formula() -> None:
    """Notes are people's own words."""
    async with (await world_with_acts()).client() as client:
        text = (await client.get("/audit", headers={"accept": "text/csv"})).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["seq"] for row in rows] == ["4", "3", "1"]
    assert [row["previous"] for row in rows[1:]] == [row["hash"] for row in rows[:-1]]


async def test_a_night_can_be_asked_for() -> None:
    """As a page, as a file and in the console, and with whose acts they are; a span of nothing is a mistake."""
    world = await world_with_acts()
    for place, event in enumerate(world.history.events):
        world.history.events[place] = replace(event, at=START - timedelta(hours=4 - place))
    async with world.client() as client:
        night = "since=3h&until=1h"
        assert [each["seq"] for each in (await client.get(f"/audit?{night}")).json()["items"]] == [3]
        lines = (await client.get("/audit?since=4h&until=2h&by=ann", headers={"accept": "application/x-ndjson"})).text
        assert [json.loads(line)["seq"] for line in lines.splitlines()] == [1]
        page = (await client.get(f"/audit?{night}", headers=HTML)).text
        assert ('id="ev-3"' in page, 'id="ev-1"' in page, 'id="ev-4"' in page) == (True, False, False)
        assert 'href="/audit.csv?since=3h&amp;until=1h"' in page
        assert (await client.get("/audit?since=1h&until=3h")).json()["field"] == "until"
        wrong = await client.get("/audit?since=yesterday", headers=HTML)
        assert (wrong.status_code, "RFC 3339" in wrong.text, 'value="yesterday"' in wrong.text) == (422, True, True)
