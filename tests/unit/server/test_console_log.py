"""The page of a job's log: what it asks the API, how it pages, and that no line can take it over."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import math
import re
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from datetime import timedelta
from html import unescape
from typing import Any
from urllib.parse import parse_qsl

import pytest

from tests.support.api_world import World
from tests.support.clocks import START
from tests.support.filed_logs import FiledLogs
from tests.support.job_log_scene import FAILED_AT, JOB, OOM, arrange, line, moment, presence
from tests.support.memory_api import MemoryLogs
from trainmedic.job.loss_spread import loss_spread
from trainmedic_core.expressions.regexes import SearchPattern
from trainmedic_logs.domain.log_search import FoundLine, LogQuery, read_time
from trainmedic_server import errors
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.console import log_excerpt, log_page
from trainmedic_server.console.log_line import LONGEST_SHOWN, ShownLine, line_body
from trainmedic_server.console.log_view import LogPlace, LogView, around
from trainmedic_server.ports.logs import LogBatch

HTML = {"accept": "text/html"}
LOG = f"/jobs/{JOB}/logs"


async def scene() -> tuple[World, FiledLogs]:
    logs = FiledLogs()
    world = World(logs=logs)
    await arrange(world, logs)
    return world, logs


def texts(page: str) -> list[str]:
    """The lines of a page, as a person reads them."""
    return [
        unescape(re.sub(r"<[^>]+>", "", text)) for text in re.findall(r"<code>(.*?)</code></td></tr>", page, re.DOTALL)
    ]


async def test_no_line_takes_over_the_page() -> None:
    """Markup, colours, signs that turn text, and a line of a megabyte: all of it is text, and the page stays small."""
    world, _ = await scene()
    async with world.client() as client:
        answer = await client.get(LOG, params={"last": "1h", "level": "info", "text": "e"}, headers=HTML)
        hostile = await client.get(
            LOG, params={"last": "1h", "rank": 1, "text": "the|evil|needle", "pattern": 1}, headers=HTML
        )
        long = await client.get(LOG, params={"last": "1h", "text": "needle"}, headers=HTML)
    assert len(gzip.compress(answer.content)) < 25_000
    for page in (answer.text, hostile.text, long.text):
        assert not re.search(r"<script>|<img src=x|\x1b|\u202e|\u2066|\x00", page)
    shown = texts(hostile.text)
    assert any("<script>document.title='taken'</script>" in text and "\\u202eevil\\u2066 end" in text for text in shown)
    assert "ERROR: the colour is gone and the text is here" in shown
    (text,) = texts(long.text)
    assert "<mark>needle</mark>" in long.text
    assert re.search(r"[\d,]{9} more characters", text)
    assert len(long.text) < 50_000


async def test_a_line_is_shown_with_its_time_rank_node_and_source() -> None:
    """A time that the line does not say itself is marked, with the reason."""
    world, _ = await scene()
    async with world.client() as client:
        page = (await client.get(LOG, params={"last": "1h", "text": "without a time"}, headers=HTML)).text
    (row,) = re.findall(r'<tr class="lv-.*?</tr>', page, re.DOTALL)
    assert "11:56:43.000</time>" in row
    assert "The line states no time" in row
    assert re.search(r'href="/jobs/vision-7b/logs\?[^"]*rank=2[^"]*" title="Only rank 2">2</a>', row)
    assert ">gpu-01</a>" in row
    assert ">training<" in row


async def test_every_filter_reaches_the_api_as_its_own() -> None:
    """An address of the API, opened in a browser, is the page of the same lines."""
    world, logs = await scene()
    async with world.client() as client:
        await client.get(
            LOG, params={"rank": 3, "level": "error", "since": "1h", "grep": "out of (memory|space)"}, headers=HTML
        )
        query, _ = logs.asked[-1]
        assert (query.job, query.rank, str(query.level), query.grep) == (JOB, 3, "error", "out of (memory|space)")
        page = await client.get(
            LOG, params={"text": "loss 2.5 | (a", "node_rank": 1, "attempt": 2, "kernel": "true"}, headers=HTML
        )
        query, _ = logs.asked[-1]
        assert (query.node_rank, query.attempt, query.kernel) == (1, 2, True)
        assert page.status_code == 200
        plain = await client.get(LOG, params={"since": "1h"})
        assert plain.headers["content-type"] == "application/x-ndjson"
        by_ending = await client.get(f"{LOG}.json", params={"since": "1h"}, headers=HTML)
        assert by_ending.content == plain.content


async def test_a_text_is_found_as_it_stands_in_capitals_or_not() -> None:
    """What means something in a pattern means itself."""
    world, logs = await scene()
    logs.lines.append(line(5, "Saved [ckpt] to s3://b/a+b (100%)\\n"))
    async with world.client() as client:
        for text in ("SAVED [CKPT]", "s3://b/a+b (100%)", "\\n"):
            page = (await client.get(LOG, params={"text": text}, headers=HTML)).text
            assert len(texts(page)) == 1, text
            assert re.search("<mark>" + re.escape(unescape(text)) + "</mark>", unescape(page), re.IGNORECASE)


async def test_a_finding_marks_its_line_and_the_verdict_leads_to_the_moment() -> None:
    """From the job's page, its evidence and its findings to the line, and from the line to the finding."""
    world, _ = await scene()
    async with world.client() as client:
        job = (await client.get(f"/jobs/{JOB}", headers=HTML)).text
        links = {unescape(link) for link in re.findall(r'href="(/jobs/[^"]+/logs\?at=[^"]+)"', job)}
        for link in links:
            page = (await client.get(link.partition("#")[0], headers=HTML)).text
            (row,) = re.findall(r'<tr [^>]*id="moment".*?</tr>', page, re.DOTALL)
            assert OOM in unescape(row)
            assert 'href="#finding-01f0"' in row
            assert 'id="finding-01f0"' in page
    assert {link.partition("?")[2] for link in links} == {
        around(FAILED_AT.isoformat(), 3, "gpu-01", "training") + "#moment",
        around(FAILED_AT.isoformat(), None, "gpu-01", "training") + "#moment",
    }
    assert "critical" in job
    assert "Rank 3 (gpu-01) ran out of GPU memory." in job


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errors.NotFound("it is not known on which nodes it runs; name a node"), "Enter the job's node"),
        (errors.LogsUnavailable("no lines of 1 node are here: gpu-01: did not answer"), "gpu-01: did not answer"),
        (errors.LogQueryRefused("the store has no pattern of this kind"), "no pattern of this kind"),
    ],
)
async def test_a_refusal_is_a_sentence_that_says_what_to_do(error: Exception, says: str) -> None:
    """Beside the form, the findings and the verdict, which are there all the same."""
    world, logs = await scene()
    logs.error = error
    async with world.client() as client:
        answer = await client.get(LOG, headers=HTML)
    (alert,) = re.findall(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)
    assert says in unescape(alert)
    assert 'id="finding-01f0"' in answer.text
    assert '<form class="filter log-search"' in answer.text


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"text": "(", "pattern": 1}, "grep: not a regular expression"),
        ({"rank": "abc"}, "rank: must be a whole number"),
        ({"last": "own", "since": "yesterday"}, "since: must be a time in UTC"),
        ({"last": "own", "since": "2026-01-31 12:00", "until": "2026-01-31 11:00"}, "until: must be later than since"),
        ({"last": "7m"}, "last: must be one of"),
        ({"before": "now~x"}, "before: is not a place"),
        ({"at": "then"}, "at: must be a time"),
    ],
)
async def test_what_is_wrong_with_a_search_is_said_beside_it(query: dict[str, Any], says: str) -> None:
    """With the text as it was typed."""
    world, _ = await scene()
    async with world.client() as client:
        answer = await client.get(LOG, params=query, headers=HTML)
    assert answer.status_code == 422
    (alert,) = re.findall(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)
    assert says in unescape(alert)


async def test_nodes_that_did_not_answer_are_named_beside_the_lines_of_the_others() -> None:
    """Each note once, however many searches a page took."""
    world, logs = await scene()
    logs.notes = ["no lines of 1 node are here: gpu-09: <did> not answer"]
    async with world.client() as client:
        page = (await client.get(LOG, params={"last": "1h", "text": "needle"}, headers=HTML)).text
    assert len(logs.asked) > 1
    assert page.count("gpu-09: &lt;did&gt; not answer") == 1
    assert len(texts(page)) == 1


async def test_lines_that_came_before_an_answer_broke_off_are_shown_with_that() -> None:
    """And the page does not pass for whole."""
    world = World()
    world.logs.batches = [LogBatch([line(5, "it came")]), errors.LogsUnavailable("no agent answers any more")]
    async with world.client() as client:
        page = (await client.get(LOG, params={"order": "oldest"}, headers=HTML)).text
    assert texts(page) == ["it came"]
    assert "The answer was cut off" in page


async def test_the_command_and_the_curl_line_ask_for_the_same_lines() -> None:
    """Each is one command, whatever was searched for."""
    world, _ = await scene()
    evil = "x'; touch taken; echo '$(id)&"
    async with world.client() as client:
        page = (await client.get(LOG, params={"text": evil, "rank": 1, "kernel": "true"}, headers=HTML)).text
    commands = [shlex.split(unescape(text)) for text in re.findall(r'data-copy="([^"]*)"', page)]
    assert [words[0] for words in commands] == ["curl", "trainmedic"]
    assert commands[1][1:6] == ["logs", "--job", JOB, "--rank", "1"]
    assert "--kernel" in commands[1]
    assert commands[1][-1] == "(?i)" + re.escape(evil)


def test_a_view_is_read_from_its_address_and_written_back() -> None:
    """A time without a zone is UTC; a moment has a minute on each side, and begins at the oldest."""
    view, wrong = LogView.read(JOB, {"text": "a b", "rank": "3", "last": "5m", "order": "oldest"}, START)
    assert (wrong, view.query()) == ("", "text=a+b&rank=3&last=5m&order=oldest")
    own, _ = LogView.read(JOB, {"last": "own", "since": "2026-01-31T11:00", "until": "2026-01-31 11:30:05"}, START)
    assert (own.since, own.until) == (START - timedelta(hours=1), START - timedelta(minutes=29, seconds=55))
    assert LogView.read(JOB, dict(_pairs(own.query())), START) == (own, "")
    near, _ = LogView.read(JOB, {"at": moment(FAILED_AT)}, START)
    assert (near.since, near.until, near.order) == (
        FAILED_AT - timedelta(minutes=1),
        FAILED_AT + timedelta(minutes=1),
        "oldest",
    )
    attempt, _ = LogView.read(JOB, {"attempt": "2"}, START)
    assert START - attempt.since == timedelta(days=30)
    assert _pairs(view.permanent(START))[-1] != ("last", "5m")
    assert "until=" in view.permanent(START)


def _pairs(query: str) -> list[tuple[str, str]]:
    return parse_qsl(query)


class Filed:
    """Answers what a page asks of the API from lines in memory, as the API does."""

    def __init__(self, lines: list[FoundLine]) -> None:
        self._logs = FiledLogs(lines)
        self.count = 0

    async def ask(self, query: dict[str, Any]) -> AsyncGenerator[dict[str, Any] | None, None]:
        self.count += 1
        until = read_time(query["until"]) if "until" in query else None
        async for batch in self._logs.search(LogQuery(JOB, read_time(query["since"]), until), (), query["limit"]):
            for each in batch.lines:
                yield each.to_json()
            for note in batch.notes:
                yield {"note": note}


SAME_TIME = [line(100, f"line {number} of one moment") for number in range(2300)]
EACH_SECOND = [line(3000 - number, f"line {number}") for number in range(0, 3000, 7)]
BURST = [line(50 - number / 1000, f"burst {number}") for number in range(5000)]


@pytest.mark.parametrize(
    ("lines", "count"),
    [(EACH_SECOND, 50), (SAME_TIME + EACH_SECOND, 400), (BURST, 900)],
    ids=["quiet", "same", "burst"],
)
@pytest.mark.parametrize("order", ["newest", "oldest"])
async def test_paging_shows_every_line_once_and_in_order(lines: list[FoundLine], count: int, order: str) -> None:
    """Also where more lines share a time than a page or a search has room for."""
    filed = Filed(lines)
    ordered = [each.text for each in sorted(lines, key=lambda each: each.at)]
    address, shown = {"last": "1h", "order": order}, list[str]()
    for _ in range(len(lines) // count + 2):
        view, wrong = LogView.read(JOB, address, START)
        assert wrong == ""
        excerpt = await log_excerpt.read(view, filed.ask, START, count)
        shown += [each.text for each in excerpt.lines]
        assert excerpt.notes == []
        place = excerpt.older if order == "newest" else excerpt.newer
        if place is None:
            break
        address = dict(_pairs(view.older(place) if order == "newest" else view.newer(place)))
    assert shown == (ordered[::-1] if order == "newest" else ordered)


async def test_the_newest_lines_of_a_day_are_found_in_few_searches() -> None:
    """The page does not read the day for them."""
    filed = Filed(EACH_SECOND)
    view, _ = LogView.read(JOB, {"last": "24h"}, START)
    excerpt = await log_excerpt.read(view, filed.ask, START, 20)
    assert [each.text for each in excerpt.lines[:2]] == ["line 2996", "line 2989"]
    assert filed.count <= 3


@pytest.mark.parametrize("text", ["", "2026~", "~3", "2026-01-31T12:00:00Z~999999", "2026-01-31T12:00:00~1"])
def test_what_names_no_place_is_refused(text: str) -> None:
    """It comes from an address."""
    with pytest.raises(ValueError, match=r"not a place|no time"):
        LogPlace.read(text)


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ({"at": "0001-01-01T00:00:00Z"}, 422),
        ({"at": "9999-12-31T23:59:59Z"}, 422),
        ({"before": "9999-12-31T23:59:59.999999Z~0"}, 422),
        ({"since": "0001-01-01T00:00:00Z"}, 422),
        ({"since": "0001-01-02T00:00:00Z"}, 200),
        ({"until": "9999-12-31T23:59:59.999999Z"}, 422),
    ],
)
async def test_a_time_at_the_end_of_all_dates_is_no_error_of_the_server(address: dict[str, str], status: int) -> None:
    """A window around it would have no limits. One that begins there is searched as far as the time allows."""
    async with World().client() as client:
        assert (await client.get(LOG, params=address, headers=HTML)).status_code == status
    assert around(address.get("at", "")) == ""


def test_matches_are_marked_by_character_and_not_by_byte() -> None:
    """Escaped like the rest of the line."""
    pattern = SearchPattern("(?i)ü<b>")
    assert line_body("äÜ<b>ö ü<B>", 0, pattern) == ("ä<mark>Ü&lt;b&gt;</mark>ö <mark>ü&lt;B&gt;</mark>")
    folded = line_body("x" * 2000 + "needle" + "y" * 2000, 0, SearchPattern("needle"))
    summary = folded.partition("</summary>")[0]
    assert "<mark>needle</mark>" in summary
    assert "x" * 400 not in summary
    assert line_body("z" * LONGEST_SHOWN, 12).endswith(
        " … and 12 characters that this page does not show</span></details>"
    )


@pytest.mark.parametrize(
    ("members", "note"),
    [
        ({}, ""),
        ({"time_source": "node_zone"}, ""),
        ({"clock": "guessed", "time_source": "arrival", "time_error": 2.5}, "or earlier. It may be off by 2.5 s."),
        ({"time_source": "file"}, "when the file was last written."),
        ({"time_source": "tea <leaves>", "time_error": "x"}, "does not state its time itself."),
    ],
)
def test_how_a_time_is_known_is_said_where_the_line_does_not_state_it(members: dict[str, Any], note: str) -> None:
    """Also in ways that this page has no words for."""
    shown = ShownLine.of({"line": "x", "at": moment(START), **members})
    assert shown.time_note.endswith(note)
    assert bool(shown.time_note) == bool(note)


async def test_a_page_that_follows_is_sent_rows_and_told_why_it_ends() -> None:
    """Lines that it has already are passed over; what the server cannot do any more is said in words."""
    known, fresh = line(10, "shown already"), line(10, "<b>new</b> at the same time")
    world = World()
    world.logs.batches = [
        LogBatch([known, fresh]),
        LogBatch(notes=["no lines of 1 node are here: gpu-01: did not answer"]),
        errors.LogsUnavailable("no agent answers"),
    ]
    async with world.client() as client:
        answer = await client.get(
            "/console/log", params={"job": JOB, "after": str(LogPlace(known.at, 1)), "text": "new"}
        )
    events = [_event(text) for text in answer.text.split("\n\n") if "data:" in text]
    *lines, (over, _, why) = events
    assert ({kind for kind, _, _ in lines}, over) == ({"lines"}, "over")
    assert {number for _, number, _ in lines} == {str(LogPlace(known.at, 2))}
    assert sum(told["count"] for _, _, told in lines) == 1
    html = "".join(told["html"] for _, _, told in lines)
    assert "shown already" not in html
    assert "&lt;b&gt;<mark>new</mark>&lt;/b&gt; at the same time" in html
    assert "gpu-01: did not answer" in "".join(told["notes"] for _, _, told in lines)
    assert "Try again" in why["why"]
    assert world.logs.closed == 1


class SilentLogs(MemoryLogs):
    """A job that prints nothing for now."""

    async def follow(self, query: LogQuery, nodes: Collection[str]) -> AsyncIterator[LogBatch]:
        await asyncio.Event().wait()
        yield LogBatch()


async def test_a_page_that_leaves_before_its_first_line_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its findings are looked up: no reader goes on without it."""
    is_asked = asyncio.Event()

    async def slow(*_: object) -> list[Any]:
        is_asked.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(log_page, "findings_of", slow)
    async with World(logs=SilentLogs()).client() as client:
        page = asyncio.create_task(client.get("/console/log", params={"job": JOB}))
        await is_asked.wait()
        page.cancel()
        await asyncio.wait({page})
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "log-follower"]


async def test_what_comes_too_fast_is_counted_and_not_sent() -> None:
    """With the time from which on it can be searched."""
    world = World()
    world.logs.batches = [LogBatch([line(9, f"flood {number}") for number in range(450)]) for _ in range(2)]
    async with world.client() as client:
        answer = await client.get("/console/log", params={"job": JOB})
    told = [data for kind, _, data in map(_event, answer.text.split("\n\n")[:-1]) if kind == "lines"]
    notes = "".join(data["notes"] for data in told)
    left_out = [int(count) for count in re.findall(r"(\d+) lines since 2026-01-31T11:59:51.000000Z came too", notes)]
    assert max(data["count"] for data in told) == 300
    assert sum(data["count"] for data in told) + sum(left_out) == 900
    assert left_out


async def test_a_page_that_was_away_for_long_is_told_what_it_has_missed() -> None:
    """It is not sent hours of lines."""
    world = World()
    async with world.client() as client:
        answer = await client.get(
            "/console/log", params={"job": JOB}, headers={"last-event-id": str(LogPlace(START - timedelta(hours=3), 2))}
        )
    assert "are not loaded. Search for them" in answer.text
    assert world.logs.asked[0][0].since == START - timedelta(minutes=10)


@pytest.mark.parametrize("query", [{}, {"job": JOB, "after": "x"}])
async def test_a_page_that_names_nothing_to_follow_is_refused(query: dict[str, str]) -> None:
    """By the status, before a stream begins."""
    async with World().client() as client:
        assert (await client.get("/console/log", params=query)).status_code == 422


def _event(text: str) -> tuple[str, str, dict[str, Any]]:
    """Kind, number and data of a server-sent event."""
    fields = dict(line.split(": ", 1) for line in text.split("\n") if ": " in line)
    return fields.get("event", ""), fields.get("id", ""), json.loads(fields.get("data", "{}"))


async def test_lines_are_for_who_may_have_them_of_the_api() -> None:
    """A viewer may. A token for deliveries may not, nor one for certain jobs, which has the API."""
    tokens = [
        Token(name, hashlib.sha256(name.encode()).digest(), frozenset({role}), jobs)
        for name, role, jobs in (
            ("look", TokenRole.VIEWER, None),
            ("hook", TokenRole.WEBHOOK, None),
            ("team", TokenRole.VIEWER, (JOB,)),
        )
    ]
    logs = FiledLogs([line(5, "for some")])
    world = World(auth=Authenticator(tokens), logs=logs)
    async with world.client() as client:

        async def status(path: str, token: str = "") -> int:
            headers = {**HTML, **({"authorization": f"Bearer {token}"} if token else {})}
            return (await client.get(path, params={"job": JOB}, headers=headers)).status_code

        assert [await status(LOG, token) for token in ("", "hook", "team")] == [303, 403, 403]
        assert [await status("/console/log", token) for token in ("", "hook", "team")] == [401, 403, 403]
        assert logs.asked == []
        assert await status(LOG, "look") == 200
        assert {query.job for query, _ in logs.asked} == {JOB}


async def test_the_log_of_any_name_can_be_opened() -> None:
    """A job that is known by its files alone stands in no list."""
    async with World().client() as client:
        answer = await client.get("/logs", params={"job": "team/a b"}, headers=HTML)
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs/team%2Fa%20b/logs")
        page = await client.get(answer.headers["location"], headers=HTML)
        assert page.status_code == 200
        assert "Log of" in page.text


async def test_the_loss_of_each_rank_is_shown_by_extremes_and_exceptions() -> None:
    """What is no number is named with its ranks; a rank that differs is named once."""
    world, _ = await scene()
    async with world.client() as client:
        page = (await client.get(f"/jobs/{JOB}", headers=HTML)).text
        listed = (await client.get("/jobs", headers=HTML)).text
    shown = unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.partition('id="losses"')[2])))
    assert "Loss is NaN on rank 3" in shown
    assert re.search(r"lowest 2\.31 0 gpu-00 .* highest, differs from the others 7\.25 5 gpu-02", shown)
    assert "Reported by 8 of 8 ranks, for step 560." in shown
    assert shown.count("7.25") == 1
    assert "1 rank differs from the others." in shown
    assert re.search(r'data-name="Loss"[^>]*>2\.314 <span class="bad">NaN</span>', listed)


async def test_of_few_ranks_none_is_said_to_differ() -> None:
    """There is nothing that it could differ from."""
    world = World()
    spread = loss_spread({0: {"loss": 2.0}, 1: {"loss": 2.1}, 2: {"loss": 9.0}, 3: {"loss": math.inf}})
    world.bus.present = [presence(spread)]
    page = await _page(world, f"/jobs/{JOB}")
    assert "Loss is infinite</b> on rank 3." in re.sub(r"\s+", " ", page)
    assert "With fewer than four finite losses, no rank counts as different." in page


@pytest.mark.parametrize(
    "losses",
    [{}, {"ranks": "all"}, {"ranks": 8, "curve": ["x"]}, {"ranks": 1, "curve": [1.0] * 100}, {"ranks": 2, "nan": "3"}],
)
async def test_losses_that_cannot_be_read_are_left_out(losses: dict[str, Any]) -> None:
    """A job writes its presence itself."""
    world = World()
    world.bus.present = [presence(losses or {"median": "<b>"})]
    async with world.client() as client:
        for path in (f"/jobs/{JOB}", "/jobs"):
            answer = await client.get(path, headers=HTML)
            assert answer.status_code == 200
            assert "<b>&" not in answer.text
    assert "No rank has reported a loss" in (await _page(world, f"/jobs/{JOB}"))


async def _page(world: World, path: str) -> str:
    async with world.client() as client:
        return (await client.get(path, headers=HTML)).text
