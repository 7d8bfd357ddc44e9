"""What open pages are told: each piece rendered once, however many look; and none that somebody missed is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping

import pytest

from tests.support.api_world import World, alert, payload
from tests.support.memory_api import MemoryHistory
from trainmedic_server.console import live as console_live
from trainmedic_server.console.fragments import Fragments
from trainmedic_server.console.live import LiveBoard
from trainmedic_server.console.standing import StandingView
from trainmedic_server.domain.run import Event
from trainmedic_server.errors import Saturated, StoreUnavailable
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.live import event_feed
from trainmedic_server.live.event_feed import EventFeed
from trainmedic_server.telemetry import Metrics

LIMITS = ServerLimits(poll_seconds=0.01, viewers=3, heartbeat_seconds=5)


class Rendered:
    """Counts what was rendered."""

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def render(self, topic: str, run_ids: Collection[str], seq: int) -> Mapping[str, str]:
        self.topics.append(topic)
        await self.goes_on.wait()
        return {topic: f"{topic} after {sorted(run_ids)}"}


def board() -> tuple[LiveBoard, MemoryHistory, Rendered]:
    history, rendered, metrics = MemoryHistory(), Rendered(), Metrics()
    feed = EventFeed(history, LIMITS.poll_seconds, 5, metrics)
    return LiveBoard(feed, rendered.render, LIMITS, metrics), history, rendered


async def told(lines: AsyncGenerator[bytes, None]) -> bytes:
    return await asyncio.wait_for(anext(lines), 60)


async def test_a_piece_is_rendered_once_for_all_who_look() -> None:
    """Three viewers, one rendering; and a run's page is told of its own run alone."""
    live, history, rendered = board()
    topics = frozenset({"head", "run:a"})
    for _ in range(3):
        await live.join(topics)
    viewers = [live.lines(0, topics) for _ in range(3)]
    for viewer in viewers:
        assert b"retry:" in await told(viewer)
    waiting = [asyncio.create_task(told(viewer)) for viewer in viewers]
    history.append("started", "b")
    pieces = await asyncio.gather(*waiting)
    assert len(set(pieces)) == 1
    assert pieces[0].startswith(b"id: 1\nevent: head\n")
    assert rendered.topics == ["head"]
    with pytest.raises(Saturated):
        await live.join(topics)
    for viewer in viewers:
        await viewer.aclose()
        await live.leave(topics)


async def test_a_page_that_was_away_too_long_is_told_to_look_again() -> None:
    """What came before anybody asked for pieces was never rendered."""
    live, history, _ = board()
    for _ in range(5):
        history.append("started", "a")
    topics = frozenset({"head"})
    await live.join(topics)
    viewer = live.lines(2, topics)
    await told(viewer)
    assert await told(viewer) == b"id: 5\nevent: reload\ndata: {}\n\n"
    await viewer.aclose()
    await live.leave(topics)


async def test_a_topic_that_nobody_asked_for_before_is_looked_at_again() -> None:
    """A page that joins others names the last event it has; pieces of its topic may never have been rendered."""
    live, history, rendered = board()
    early, late = frozenset({"head"}), frozenset({"head", "runs"})
    await live.join(early)
    first = live.lines(0, early)
    await told(first)
    history.append("started", "a")
    await told(first)
    await live.join(late)
    second = live.lines(0, late)
    await told(second)
    assert b"event: reload" in await told(second)
    assert rendered.topics == ["head"]
    for viewer, topics in ((first, early), (second, late)):
        await viewer.aclose()
        await live.leave(topics)


async def test_a_page_that_comes_while_others_are_told_is_told_too() -> None:
    """Its topic was not wanted when the event was taken up; so it looks again, and is not told half of it."""
    live, history, rendered = board()
    early, late = frozenset({"head"}), frozenset({"head", "now"})
    await live.join(early)
    first = live.lines(0, early)
    await told(first)
    rendered.goes_on.clear()
    history.append("started", "a")
    waiting = asyncio.create_task(told(first))
    async with asyncio.timeout(60):
        while not rendered.topics:
            await asyncio.sleep(0.001)
    await live.join(late)
    second = live.lines(0, late)
    await told(second)
    assert await told(second) == b"id: 1\nevent: reload\ndata: {}\n\n"
    rendered.goes_on.set()
    assert b"event: head" in await waiting
    for viewer, topics in ((first, early), (second, late)):
        await viewer.aclose()
        await live.leave(topics)


async def test_a_page_that_was_told_of_an_event_sees_it_when_it_asks_again() -> None:
    """How things stand is kept for a moment; not for who has heard of something newer."""
    world = World()
    async with world.client() as client:
        assert "node-7" not in (await client.get("/", headers={"accept": "text/html"})).text
        entry = alert(labels={"alertname": "GPUHot", "node": "node-7"})
        await client.post("/webhook", json=payload(entry))
        newest = await world.history.last_seq()
        for named in ("", "x", "9" * 19, str(newest)):
            page = await client.get("/", headers={"accept": "text/html", "last-event-id": named})
            assert page.status_code == 200
        assert "node-7" in page.text
        assert f'data-seq="{newest}"' in page.text


@pytest.mark.parametrize("topic", ["head", "now"])
async def test_open_pages_are_told_nothing_of_a_state_that_is_not_known(topic: str) -> None:
    """It would stay until the next event; the board tries again until the store responds."""

    class Unknown:
        async def now(self, *, since: int = 0) -> StandingView:
            return StandingView(0, None, False)

    fragments = Fragments(None, None, Unknown())  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        await fragments.render(topic, (), 7)


async def test_a_page_that_leaves_while_the_store_is_slow_takes_no_place() -> None:
    """Its request is cut off before it has joined."""
    pages, history, _ = board()

    async def slow() -> int:
        await asyncio.sleep(60)
        return 0

    history.last_seq = slow  # type: ignore[method-assign]
    for _ in range(LIMITS.viewers + 1):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await pages.join({"head"})
    assert (pages._viewers, pages._reader, pages._feed._listeners) == (0, None, 0)


async def test_a_page_that_joined_while_the_store_failed_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader begins once the store responds, after events that nobody rendered."""
    for module in (console_live, event_feed):
        monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    pages, history, _ = board()
    last_seq, topics = history.last_seq, frozenset({"head"})

    async def fails() -> int:
        raise StoreUnavailable("away")

    history.last_seq = fails  # type: ignore[method-assign]
    await pages.join(topics)
    viewer = pages.lines(0, topics)
    await told(viewer)
    history.append("started", "a")
    waiting = asyncio.create_task(told(viewer))
    await asyncio.sleep(0)
    history.last_seq = last_seq  # type: ignore[method-assign]
    line = await waiting
    async with asyncio.timeout(60):
        while line == console_live.STILL_HERE:
            line = await told(viewer)
    assert line == b"id: 1\nevent: reload\ndata: {}\n\n"
    await viewer.aclose()
    await pages.leave(topics)


async def test_a_page_made_in_an_outage_looks_again_once_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have been listening for long. An earlier look would find the outage again, and then stay so."""
    for module in (console_live, event_feed):
        monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    pages, history, _ = board()
    history.append("started", "a")
    events_after, topics = history.events_after, frozenset({"head"})
    await pages.join(topics)

    async def fails(*_: object) -> list[Event]:
        raise StoreUnavailable("away")

    history.events_after = fails  # type: ignore[method-assign,assignment]
    async with asyncio.timeout(60):
        while not pages._feed.is_down:
            await asyncio.sleep(0.01)
    await pages.join(topics)
    viewer = pages.lines(0, topics)
    await told(viewer)
    for _ in range(3):
        assert await told(viewer) == console_live.STILL_HERE
    history.events_after = events_after  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        while (line := await told(viewer)) == console_live.STILL_HERE:
            pass
    assert line == b"id: 1\nevent: reload\ndata: {}\n\n"
    await viewer.aclose()
    for _ in range(2):
        await pages.leave(topics)


async def test_a_page_that_reads_too_slowly_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments that it has not taken were dropped for newer ones."""
    monkeypatch.setattr(console_live, "_KEPT_PIECES", 2)
    monkeypatch.setattr(console_live, "_BETWEEN_SECONDS", 0)
    pages, history, _ = board()
    topics = frozenset({"head"})
    await pages.join(topics)
    viewer = pages.lines(0, topics)
    await told(viewer)
    waiting = asyncio.create_task(told(viewer))
    history.append("started", "a")
    assert b"id: 1" in await waiting
    for number in range(2, 6):
        history.append("started", "a")
        async with asyncio.timeout(60):
            while pages._seq < number:
                await asyncio.sleep(0.001)
    assert await told(viewer) == b"id: 3\nevent: reload\ndata: {}\n\n"
    assert (await told(viewer)).startswith(b"id: 4")
    await viewer.aclose()
    await pages.leave(topics)


async def test_pages_that_join_together_are_all_told_to_look_again() -> None:
    """As after a restart: none is told of events from before the reader began."""
    live, history, _ = board()
    last_seq, topics = history.last_seq, frozenset({"head"})

    async def slow() -> int:
        await asyncio.sleep(0.05)
        return await last_seq()

    history.last_seq = slow  # type: ignore[method-assign]
    history.append("started", "a")
    history.append("started", "a")

    async def open_page() -> bytes:
        await live.join(topics)
        viewer = live.lines(1, topics)
        await told(viewer)
        first = await told(viewer)
        await viewer.aclose()
        return first

    assert {*await asyncio.gather(open_page(), open_page())} == {b"id: 2\nevent: reload\ndata: {}\n\n"}
    for _ in range(2):
        await live.leave(topics)
