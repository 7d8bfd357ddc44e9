"""What the console answers and what the API does, on the same paths; without a socket."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.support.api_world import World, alert, payload
from tests.support.clocks import START
from tests.support.memory_api import MemoryBook
from trainmedic_core.cli.exits import Unreachable
from trainmedic_server import errors
from trainmedic_server.cli.history import history
from trainmedic_server.console.assets import Assets
from trainmedic_server.console.formats import coded, linked_runs
from trainmedic_server.console.playbook_pages import start_body
from trainmedic_server.console.standing import KEPT_SECONDS, ServerStanding, StandingView
from trainmedic_server.domain.group_counts import GroupCounts
from trainmedic_server.domain.playbook import Playbook
from trainmedic_server.domain.run import StepState, StepStatus
from trainmedic_server.http.negotiation import preferred
from trainmedic_server.ports.outside import Presence

HTML = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
STATIC = Path(__file__).parents[3] / "app/trainmedic_server/console/static"


async def test_a_browser_gets_the_page_and_everything_else_the_answer() -> None:
    """On the same path, by what the client accepts; and by an ending, for links."""
    async with World().client() as client:
        await client.post("/webhook", json=payload())
        run = (await client.get("/history")).json()["items"][0]["run_id"]
        for path, api_path in (
            ("/runs", "/history"),
            (f"/runs/{run}", f"/history/{run}"),
        ):
            page = await client.get(path, headers=HTML)
            assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            plain = await client.get(api_path)
            for accept in ("*/*", "application/json"):
                assert (await client.get(path, headers={"accept": accept})).content == plain.content
            assert (await client.get(f"{path}.json", headers=HTML)).content == plain.content
        table = await client.get("/runs.csv", headers=HTML)
        assert table.headers["content-type"].startswith("text/csv")


async def test_pages_say_how_far_a_browser_may_trust_them() -> None:
    """The policy binds every answer of the console; pages are not kept, files are for ever."""
    async with World().client() as client:
        for path in ("/", "/runs", "/docs", "/nothing-here", "/runs?q=nonsense"):
            answer = await client.get(path, headers=HTML)
            if answer.headers["content-type"].startswith("text/html"):
                assert answer.headers["content-security-policy"] == POLICY
                assert answer.headers["referrer-policy"] == "same-origin"
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["cache-control"] == "no-store"
        (sheet,) = re.findall(r'rel="stylesheet" href="([^"]+)"', (await client.get("/", headers=HTML)).text)
        kept = await client.get(sheet)
        assert "immutable" in kept.headers["cache-control"]
        assert (await client.get("/static/console.000000000000.css")).status_code == 404


@pytest.mark.parametrize("path", ["/runs", "/runs.json", "/jobs", "/", "/nothing-here", "/openapi.json"])
async def test_no_cache_gives_the_answer_in_place_of_the_page(path: str) -> None:
    """Page and answer have one address, and each is for who asked."""
    async with World().client() as client:
        headers = (await client.get(path)).headers
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
    assert {"Accept", "Authorization", "Cookie"} <= set(headers["vary"].split(", "))


async def test_what_a_page_offers_to_copy_is_one_command() -> None:
    """Whatever a link or a label has put into it: what is pasted into a shell runs nothing else."""
    evil = "x'; touch taken; echo '$(id)&"
    hostile = alert(labels={"alertname": "GPUHot", "node": evil})
    async with World().client() as client:
        await client.post("/webhook", json=payload(hostile))
        for path in ("/alerts", "/report", "/runs", f"/nodes/{quote(evil, safe='')}"):
            asked = {"/alerts": "alertname", "/report": "since", "/runs": "q"}.get(path, "q")
            value = f"node:{quote(evil)}" if path == "/runs" else evil
            page = (await client.get(path, params={asked: value}, headers=HTML)).text
            lines = [unescape(line) for line in re.findall(r'data-copy="([^"]*)"', page)]
            assert {line.split()[0] for line in lines} == {"curl", "trainmedic"}, path
            for line in lines:
                assert not [each for each in shlex.shlex(line, punctuation_chars=True, posix=True) if each in ";&|"]


@pytest.mark.parametrize(
    ("query", "command"),
    [
        ("open=true&since=", "trainmedic history --open"),
        ("q=owed:true alert:Hot", "trainmedic history --owes-undo --alert Hot"),
        ("status=failed,rejected&since=", "trainmedic history --status failed --status rejected"),
        ("open=false", None),
    ],
)
async def test_the_offered_command_has_the_filters_of_the_page(query: str, command: str | None) -> None:
    """As the command line takes them; none is offered if it has no option for one. The API takes its own too."""
    async with World().client() as client:
        page = (await client.get(f"/runs?{query}", headers=HTML)).text
        offered = [unescape(line) for line in re.findall(r'data-copy="([^"]*)"', page)]
        assert [line for line in offered if line.startswith("trainmedic")] == ([command] if command else [])
        (curl,) = [line for line in offered if line.startswith("curl")]
        assert (await client.get(shlex.split(curl)[-1])).status_code == 200
    if command is not None:
        shown = CliRunner().invoke(history, [*shlex.split(command)[2:], "--server", "http://127.0.0.1:1"])
        assert shown.exit_code == Unreachable.exit_code, shown.output


async def test_the_link_to_the_answer_is_no_link_to_the_page() -> None:
    """A browser that follows it prefers HTML, as always."""
    async with World().client() as client:
        for path in ("/", "/runs", "/approvals", "/alerts", "/playbooks", "/playbooks/cool", "/jobs", "/report"):
            (link,) = re.findall(r'href="([^"]+)" data-json', (await client.get(path, headers=HTML)).text)
            answer = await client.get(unescape(link), headers=HTML)
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), link


async def test_the_list_of_playbooks_says_what_each_begins_with() -> None:
    """Also those that no alert starts, which are not all started by people."""
    begins = {
        "started by group:hardware": {"manual": {"by": ["group:hardware"]}},
        "schedule 0 3 * * 2 (UTC)": {"schedule": "0 3 * * 2"},
        "runs of cool that ended as failed": {"run": {"playbook": "cool", "status": "failed"}},
        "event rack": {"event": "rack"},
        "GPUHot, NodeHot": {"alert": ["GPUHot", "NodeHot"]},
    }
    world = World()
    world.catalog.books = [
        MemoryBook(
            Playbook.model_validate(
                {"playbook": f"p-{number}", "on": on, "target": "cluster", "steps": [{"action": "notify"}]}
            )
        )
        for number, on in enumerate(begins.values())
    ]
    async with world.client() as client:
        page = (await client.get("/playbooks", headers=HTML)).text
    assert re.findall(r'</td><td class="whole">([^<]*)</td>', page) == list(begins)


async def test_the_report_says_times_as_times_and_each_thing_once() -> None:
    """No bare seconds, and no names of members in the place of what they hold."""
    async with World().client() as client:
        await client.post("/webhook", json=payload())
        page = (await client.get("/report?whole=1", headers=HTML)).text
    assert "since, until" not in page
    assert not re.search(r"_seconds|[a-z] seconds", page)
    assert re.search(r"<dt>Assumed time to a manual repair</dt><dd>\d+ (s|min|h)", page)
    assert page.count(">Gpu hours kept<") + page.count(">GPU-hours kept<") == 1


@pytest.mark.parametrize("repeated", [1, 400])
async def test_an_alert_may_be_pasted_whatever_its_length(repeated: int) -> None:
    """A short one stands in the address after that; a webhook's long body would fit into none."""
    pasted = json.dumps(payload(*[alert(fingerprint=f"{number:016x}") for number in range(repeated)]))
    async with World().client() as client:
        answer = await client.post("/console/explain", data={"alert": pasted, "at": ""}, headers=HTML)
        assert answer.status_code == (303 if repeated == 1 else 200)
        page = await client.get(answer.headers["location"], headers=HTML) if repeated == 1 else answer
        other = {**HTML, "origin": "http://evil.example"}
        assert (await client.post("/console/explain", data={"alert": pasted}, headers=other)).status_code == 403
    assert page.text.count('class="question">GPUHot') == repeated
    assert 'role="alert"' not in page.text


async def test_a_pasted_text_of_many_brackets_is_no_alert() -> None:
    """Python's parser gives up with an error of its own."""
    async with World().client() as client:
        page = await client.get("/explain", params={"alert": "[" * 3000}, headers=HTML)
    assert (page.status_code, "This is not JSON" in page.text) == (200, True)


async def test_a_referer_that_is_no_address_leads_to_the_first_page() -> None:
    """A refused form has a link back to its page."""
    async with World().client() as client:
        page = await client.post("/console/nothing", headers={**HTML, "referer": "http://["}, data={"a": "b"})
    assert (page.status_code, 'href="/"' in page.text) == (404, True)


async def test_text_from_outside_stays_text() -> None:
    """A label that would be a script, an annotation that would be a link to one, and characters that cannot be seen."""
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202e"
    hostile = alert(
        labels={"alertname": "GPUHot", "node": "node-1", "note": evil},
        annotations={"summary": evil, "dashboard": "javascript:alert(3)"},
        generatorURL="javascript:alert(4)",
    )

    class Seen(HTMLParser):
        tags: list[str] = []  # noqa: RUF012
        links: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.tags.append(tag)
            self.links += [value or "" for name, value in attributes if name in ("href", "src", "action")]
            assert not [name for name, _ in attributes if name.startswith("on") or name == "style"]

    async with World().client() as client:
        await client.post("/webhook", json=payload(hostile))
        run = (await client.get("/history")).json()["items"][0]["run_id"]
        for path in ("/runs", f"/runs/{run}", "/"):
            page = (await client.get(path, headers=HTML)).text
            seen = Seen()
            seen.feed(page)
            assert page.count("<script") == 2
            assert [link for link in seen.links if not link.startswith(("/", "#"))] == []
            assert "\u202e" not in page


async def test_the_reference_of_the_api_needs_nothing_from_elsewhere() -> None:
    """Each call is in it, with a line of curl."""
    world = World()
    async with world.client() as client:
        page = (await client.get("/docs", headers={"accept": "*/*"})).text
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    for path, methods in world.app.openapi()["paths"].items():
        for method in methods:
            assert f"<b>{method.upper()}</b> <code>{path}</code>" in page


def test_the_files_stay_within_the_budget() -> None:
    """30 kB of script in all, 8 kB of it our own, and 12 kB of style, compressed."""
    sizes = {name: len(asset.compressed) for name, asset in Assets().all.items()}
    assert sizes["console.js"] <= 8_000
    assert sum(size for name, size in sizes.items() if name.endswith(".js")) <= 30_000
    assert sizes["console.css"] <= 12_000


def test_the_vendored_script_is_the_one_that_was_released() -> None:
    """By its checksum, with its licence beside it."""
    digest = hashlib.sha256((STATIC / "htmx-2.0.10.min.js").read_bytes()).hexdigest()
    assert digest == "71ea67185bfa8c98c39d31717c6fce5d852370fcdfd129db4543774d3145c0de"
    assert (STATIC / "htmx-LICENSE.txt").read_text().startswith("Zero-Clause BSD")


async def test_a_page_is_compressed_for_who_takes_it() -> None:
    """And is the same page."""
    async with World().client() as client:
        answer = await client.get("/runs", headers={**HTML, "accept-encoding": "gzip"})
        assert answer.headers["content-encoding"] == "gzip"
        plain = await client.get("/runs", headers={**HTML, "accept-encoding": "identity"})
    assert answer.text == plain.text
    assert len(gzip.compress(answer.content)) < 25_000


@pytest.mark.parametrize("accept", ["*/*", "application/json", "", "text/html;q=0.1,application/json"])
def test_a_client_that_wants_no_page_gets_none(accept: str) -> None:
    """curl's ``*/*`` is no wish for a page."""
    assert preferred(accept, ("application/json", "text/html")) == "application/json"


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("q=statu:failed", "did you mean"),
        ("q=nonsense", "the names are status, playbook"),
        ("status=broken", "succeeded"),
        ("since=yesterday-ish", "since"),
    ],
)
async def test_a_wrong_filter_is_said_beside_the_filter(query: str, says: str) -> None:
    """What is wrong and what is valid; the page stays, and what asks while somebody types is shown it too."""
    async with World().client() as client:
        answer = await client.get(f"/runs?{query}", headers=HTML)
        assert answer.status_code == 422
        assert says in unescape(answer.text.partition('id="wrong-filter">')[2].partition("</p>")[0])
        assert 'name="q"' in answer.text
        assert (await client.get(f"/runs?{query}", headers={**HTML, "hx-request": "true"})).status_code == 200


async def test_a_wrong_filter_of_alerts_is_said_in_words_beside_it() -> None:
    """No pattern of a program is shown to a person."""
    async with World().client() as client:
        answer = await client.get("/alerts?label=node-7", headers=HTML)
        assert answer.status_code == 422
        assert "label: must be like name=value" in answer.text.partition('id="wrong-filter">')[2]
        assert 'value="node-7"' in answer.text


async def test_what_people_did_is_there_as_a_file() -> None:
    """From the page, of whom it shows."""
    async with World().client() as client:
        page = (await client.get("/audit?by=anonymous", headers=HTML)).text
        for kind, media_type in (("csv", "text/csv"), ("ndjson", "application/x-ndjson")):
            assert f'href="/audit.{kind}?by=anonymous"' in page
            whole = await client.get(f"/audit.{kind}?by=anonymous", headers=HTML)
            assert whole.headers["content-type"].startswith(media_type)


async def test_a_page_that_is_not_there_leads_on_to_those_that_are() -> None:
    """Whatever is wrong, a browser keeps the navigation; programs get a problem document."""
    async with World().client() as client:
        for path in ("/nothing-here", "/runs/ffffffff", "/playbooks/none", "/console/nothing"):
            answer = await client.get(path, headers=HTML)
            assert answer.status_code == 404
            assert '<nav aria-label="Pages">' in answer.text
            assert "WWW-Authenticate" not in answer.headers
        assert (await client.get("/nothing-here")).headers["content-type"] == "application/problem+json"
        assert (await client.get("/openapi.json", headers=HTML)).headers["content-type"] == "application/json"
        assert (await client.get("/nothing-here", headers={"accept": "*/*"})).status_code == 404


@pytest.mark.parametrize("name", ["team/llm", "a/b/c", "llm?x=1#y", "100%/2F", "näme"])
async def test_a_name_is_linked_to_the_page_that_has_it_whatever_is_in_it(name: str) -> None:
    """Of a job as of a node. A server has its paths decoded, so that a slash of a name is one of the path."""
    made = World()
    made.bus.present = [Presence(name, START, {})]
    async with made.client() as client:
        for kind in ("jobs", "nodes"):
            listed = (await client.get(f"/{kind}", headers=HTML)).text
            (link,) = re.findall(rf'href="(/{kind}/[^"]+)"', listed)
            assert link == f"/{kind}/{quote(name, safe='')}"
            page = await client.get(unescape(link), headers=HTML)
            assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert f"<title>{kind.removesuffix('s').title()} {escape(name)} ·" in page.text


async def test_the_page_of_a_job_shows_its_evaluations() -> None:
    """The newest value of each metric; one that was no number is said to be none. What a job writes is only text."""
    reported = {"step": 1200, "at": "2026-05-04T12:30:00Z"}
    metrics = [
        {"metric": "accuracy", "value": 0.625, **reported},
        {"metric": "bleu", "value": "NaN", **reported},
        {"metric": "<b>x</b>", "value": "<i>", "at": 7},
        "no mapping",
    ]
    made = World()
    made.bus.present = [Presence("llm-1", START, {"evaluations": metrics})]
    async with made.client() as client:
        page = (await client.get("/jobs/llm-1", headers=HTML)).text
    shown = [re.sub(r"<[^>]+>", " ", row).split() for row in re.findall(r"<tr><th scope=\"row\">.*?</tr>", page)]
    assert shown[0][:3] == ["accuracy", "0.625", "1200"]
    assert shown[1][:6] == ["bleu", "not", "a", "finite", "number", "1200"]
    assert "<b>x</b>" not in page
    assert "no mapping" not in page


async def test_the_page_of_a_job_leaves_the_answers_about_jobs_to_the_api() -> None:
    """A browser that asks for a job's report is told of the report, and gets no page of a job of such a name."""
    async with World().client() as client:
        for job in ("llm", "team/llm", "team%2Fllm"):
            answer = await client.get(f"/jobs/{job}/report", headers=HTML)
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["detail"].startswith(f"The history has nothing about job {job.replace('%2F', '/')} in")


async def test_an_id_that_several_runs_have_leads_to_each() -> None:
    """Nobody copies 36 characters out of a sentence; what else stands there stays text."""
    world = World()
    async with world.client() as client:
        for node in ("node-1", "node-2"):
            await client.post("/webhook", json=payload(alert(labels={"alertname": "GPUHot", "node": node})))
        ids = list(world.history.records)
        found = [record.run for record in world.history.records.values()]
        await world.findings.transact(lambda tx: tx.add_runs(found))
        answer = await client.get(f"/runs/{ids[0][:6]}", headers=HTML)
        assert answer.status_code == 409
        for run_id in ids:
            assert f'<a href="/runs/{run_id}">{run_id}</a>' in answer.text
    hostile = f"<b>{ids[0]}</b> x{ids[0]}"
    assert linked_runs(hostile) == f'&lt;b&gt;<a href="/runs/{ids[0]}">{ids[0]}</a>&lt;/b&gt; x{ids[0]}'


async def test_a_run_by_hand_is_shown_before_it_is_done_and_then_led_to() -> None:
    """The form does nothing by itself; what it shows has the button, and a double click starts one run."""
    world = World()
    async with world.client() as client:
        wanted = {"target": "node:node-1", "labels": "rack=r7, zone=a"}
        shown = await client.post("/console/playbooks/cool/try", data=wanted, headers=HTML)
        assert (shown.status_code, world.history.records) == (200, {})
        assert "It would act" in shown.text
        assert 'action="/console/playbooks/cool/start"' in shown.text
        answer = await client.post("/console/playbooks/cool/start", data={**wanted, "note": "fan"}, headers=HTML)
        (run,) = world.history.records.values()
        assert answer.headers["location"] == f"/runs/{run.run.id}"
        assert run.run.alert_labels["zone"] == "a"
        assert "Started. This is its run." in (await client.get(answer.headers["location"], headers=HTML)).text
        wrong = await client.post("/console/playbooks/cool/try", data={"target": "nowhere"}, headers=HTML)
        assert (wrong.status_code, 'role="alert"' in wrong.text, 'value="nowhere"' in wrong.text) == (200, True, True)


async def test_several_questions_are_answered_each_by_its_own_order() -> None:
    """With one note; where one is refused the others are answered all the same, and the page says which."""
    world = World()
    async with world.client() as client:
        for node in ("node-1", "node-2", "node-3"):
            entry = alert(labels={"alertname": "GPUHot", "node": node}, fingerprint=node[-1] * 16)
            await client.post("/webhook", json=payload(entry))
        first, second, third = world.history.records
        form = {"run": [first, second, second], "kind": "approve", "note": "looked at both"}
        answer = await client.post("/console/approvals", data=form, headers=HTML)
        assert (answer.status_code, answer.headers["location"]) == (303, "/approvals")
        orders = [record.orders for record in world.history.records.values()]
        assert [[(each.kind, each.note) for each in of_run] for of_run in orders] == [
            *([("approve", "looked at both")], [("approve", "looked at both")], [])
        ]
        mixed = await client.post("/console/approvals", data={"run": [first, third], "kind": "reject"}, headers=HTML)
        assert (mixed.status_code, "1 of 2 questions were rejected" in mixed.text) == (200, True)
        assert f"Run {first} is closed." in mixed.text
        assert [order.kind for order in world.history.records[third].orders] == ["reject"]
        for wrong in ({"kind": "approve"}, {"run": [first], "kind": "undo"}):
            assert (await client.post("/console/approvals", data=wrong, headers=HTML)).status_code == 422


async def test_the_answer_of_each_rank_is_shown_beside_how_many_there_are() -> None:
    """As a job of several ranks answers: their number, and each one's answer."""
    world = World()
    answers = {"0": {"status": "applied"}, "1": {"status": "refused"}, "2": {"status": "silent"}}
    step = StepState("steps", 0, "slow", "action", status=StepStatus.SUCCEEDED, output={"ranks": 3, "by_rank": answers})
    async with world.client() as client:
        await client.post("/webhook", json=payload())
        ((run_id, record),) = world.history.records.items()
        world.history.records[run_id] = replace(record, run=replace(record.run, steps=(step,)))
        page = (await client.get(f"/runs/{run_id}", headers=HTML)).text
    assert re.findall(r'<li class="(\w+)" title="rank (\d): (\w+)"', page) == [
        *(("good", "0", "applied"), ("bad", "1", "refused"), ("going", "2", "silent"))
    ]


async def test_what_comes_next_reads_as_a_sentence() -> None:
    """Also where nothing stands before it."""
    world = World()
    async with world.client() as client:
        await client.post("/webhook", json=payload())
        (run_id,) = world.history.records
        page = (await client.get(f"/runs/{run_id}", headers=HTML)).text
        assert "<dt>What happens next</dt><dd>next " in page


async def test_the_description_of_the_api_shows_code_as_code() -> None:
    """No backtick is left over, and nothing in them is markup."""
    async with World().client() as client:
        page = (await client.get("/docs", headers=HTML)).text
    assert "<code>application/problem+json</code>" in page
    assert "`" not in page
    assert coded("a `<b>` c") == "a <code>&lt;b&gt;</code> c"


def test_fields_of_inputs_become_inputs_of_the_start() -> None:
    """Empty ones are left out, so that the default counts; the target may be derived."""
    fields = {"target": " ", "labels": "rack=r7", "input.node": "n1", "input.watts": " ", "key": "k"}
    assert start_body("cap", fields) == {
        "playbook": "cap",
        "target": None,
        "labels": {"rack": "r7"},
        "inputs": {"node": "n1"},
    }


async def test_a_group_is_shown_with_its_counts_and_leads_to_its_members() -> None:
    """And a member to its parent."""
    world = World()
    async with world.client() as client:
        for node in ("node-1", "node-2"):
            entry = alert(labels={"alertname": "GPUHot", "node": node}, fingerprint=node[-1] * 16)
            await client.post("/webhook", json=payload(entry))
        parent, member = world.history.records.values()
        counts = GroupCounts(4, not_begun=1, succeeded=1, failed=2, owing=1, batch=2)
        world.history.records[parent.run.id] = replace(parent, run=replace(parent.run, group=counts))
        world.history.records[member.run.id] = replace(member, run=replace(member.run, parent=parent.run.id, batch=1))
        shown = (await client.get(f"/runs/{parent.run.id}", headers=HTML)).text
        assert "<b>1</b> succeeded, <b>2</b> failed, <b>1</b> not begun" in shown
        assert "1 owes an undo" in shown
        assert f'href="/runs?parent={parent.run.id}&amp;status=failed' in shown
        told = (await client.get(f"/runs/{member.run.id}", headers=HTML)).text
        assert f'Part of a group: <a href="/runs/{parent.run.id}">its parent run</a>, batch 2.' in told


async def test_a_job_with_any_name_is_listed() -> None:
    """Also one with a sign that is a digit, but no decimal one."""
    world = World()
    world.bus.present = [Presence(name, START, {}) for name in ("llm-10", "llm-9", "1²", "²")]
    async with world.client() as client:
        answer = await client.get("/jobs", headers=HTML)
    assert answer.status_code == 200
    assert answer.text.index(">llm-9<") < answer.text.index(">llm-10<")


async def test_a_store_that_does_not_respond_is_stated_on_the_page() -> None:
    """Pages need its newest event, which they cannot read either."""
    world = World()

    async def away() -> int:
        raise errors.StoreUnavailable("away")

    world.history.last_seq = away  # type: ignore[method-assign]
    world.history.away = True
    async with world.client() as client:
        page = await client.get("/", headers=HTML)
        failed = await client.get("/runs", headers=HTML)
    assert (page.status_code, "The run store is not responding." in page.text) == (200, True)
    assert (failed.status_code, "data-again" in failed.text) == (503, True)  # `console.js` loads it again


async def test_a_request_that_is_cut_off_makes_no_old_state_new() -> None:
    """The next one asks again."""
    answered = asyncio.Event()
    answered.set()

    class Api:
        reads = 0

        async def get(self, path: str) -> Mapping[str, Any]:
            await answered.wait()
            self.reads += path == "/now"
            return {"ready": True, "reads": self.reads}

    class NoGpus:
        async def refresh(self) -> None: ...

    async def newest() -> int:
        return 1

    standing = ServerStanding(Api(), newest, NoGpus())  # type: ignore[arg-type]
    assert await standing.now() == StandingView(1, {"ready": True, "reads": 1}, True)
    await asyncio.sleep(KEPT_SECONDS + 1)
    answered.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(KEPT_SECONDS / 2):
            await standing.now()
    answered.set()
    assert await standing.now() == StandingView(1, {"ready": True, "reads": 2}, True)


MALFORMED_REPORTS: tuple[dict[str, Any], ...] = (
    {"gpus": 5},
    {"gpus": [5, {"uuid": 5, "pods": 5, "index": [1]}]},
    {"gpus": [{"uuid": "GPU-1", "power_limit_watts": 10**400, "max_limit_watts": 300, "default_limit_watts": "x"}]},
    {"evaluations": [{"metric": "m", "value": 1.0, "step": 1, "at": "2026-01-31T12:00:00"}]},
    {"evaluations": [{"metric": "m", "value": 1.0, "step": 1, "at": "0001-01-01T00:00:00+14:00"}]},
    {"capabilities": 5, "loss": 10**400, "started": "2026-01-31T12:00:00"},
)


@pytest.mark.parametrize("reported", MALFORMED_REPORTS)
async def test_no_report_of_a_job_or_an_agent_breaks_a_page(reported: dict[str, Any]) -> None:
    """Others may write reports too, and a list has those of all."""
    world = World()
    world.bus.present = [Presence("n1", START, reported), Presence("n2", START, {"gpus": [{"uuid": "GPU-2"}]})]
    async with world.client() as client:
        for path in ("/nodes", "/nodes/n1", "/nodes/n1?whole=1", "/jobs", "/jobs/n1", "/jobs/n1?whole=1"):
            page = await client.get(path, headers=HTML)
            assert page.status_code == 200, path
            assert "n1" in page.text
