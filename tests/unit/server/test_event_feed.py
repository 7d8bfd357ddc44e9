"""The feed of events: nothing missed, nothing twice, nothing kept for anyone."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.support.memory_api import MemoryHistory
from trainmedic_server.domain.run import Event
from trainmedic_server.errors import Saturated, StoreUnavailable
from trainmedic_server.live import event_feed as feeds
from trainmedic_server.live.event_feed import EventFeed
from trainmedic_server.telemetry import Metrics


def make(history: MemoryHistory, listeners: int = 5) -> EventFeed:
    return EventFeed(history, 0.0, listeners, Metrics())  # it polls each time that the loop comes round


async def read(feed: EventFeed, begin: int, count: int) -> list[int]:
    """The seqs of the next `count` events after `begin`."""
    seqs: list[int] = []
    position = begin
    while len(seqs) < count:
        events = await feed.after(position, 5.0)
        assert events, "no event came"
        seqs += [event.seq or 0 for event in events]
        position = seqs[-1]
    return seqs


async def append(history: MemoryHistory, count: int) -> None:
    for _ in range(count):
        history.append("tick")
        await asyncio.sleep(0)


async def test_replay_and_live_are_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a listener's place, while events are appended all the time and the ring is small."""
    monkeypatch.setattr(feeds, "_RING", 7)
    monkeypatch.setattr(feeds, "BATCH", 3)
    history = MemoryHistory()
    feed = make(history)
    for _ in range(20):
        history.append("tick")
    for _ in range(3):
        feed.join()
    readers = [asyncio.create_task(read(feed, begin, 60 - begin)) for begin in (0, 13, 20)]
    await append(history, 40)
    for reader, begin in zip(readers, (0, 13, 20), strict=True):
        assert await reader == list(range(begin + 1, 61))
    await feed.close()


@pytest.mark.parametrize(
    ("error", "level", "counted"),
    [(StoreUnavailable("its disk is full"), "warning", 0), (KeyError("a bug"), "error", 1)],
)
async def test_a_bug_is_not_taken_for_an_outage(error: Exception, level: str, counted: int) -> None:
    """It is counted, and logged with its place in the code; the outage with its reason."""
    history, metrics = MemoryHistory(), Metrics()

    async def failing() -> int:
        raise error

    history.last_seq = failing  # type: ignore[method-assign]
    feed = EventFeed(history, 0.0, 5, metrics)
    with capture_logs() as logged:
        feed.join()
        while not logged:
            await asyncio.sleep(0)
    await feed.close()
    assert (logged[0]["log_level"], logged[0].get("exc_info"), "disk" in logged[0].get("error", "")) == (
        level,
        True if counted else None,
        not counted,
    )
    assert (metrics.registry.get_sample_value("trainmedic_loop_errors_total", {"loop": "events"}) or 0) == counted


async def test_history_is_not_asked_while_nobody_listens() -> None:
    """The poller starts with the first listener and ends with the last."""
    history = MemoryHistory()
    asked = 0

    async def counted() -> int:
        nonlocal asked
        asked += 1
        return 0

    history.last_seq = counted  # type: ignore[method-assign]
    feed = make(history)
    await asyncio.sleep(0)
    assert asked == 0
    feed.join()
    await asyncio.sleep(0)
    assert asked == 1
    await feed.leave()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "events"]


async def test_the_poller_survives_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on; what happened meanwhile is not missed. An outage is no unexpected error."""
    monkeypatch.setattr(feeds, "_RETRY_SECONDS", 0.0)
    history = MemoryHistory()
    metrics = Metrics()
    feed = EventFeed(history, 0.0, 5, metrics)
    real, failures = history.events_after, 0

    async def flaky(seq: int, limit: int) -> list[Event]:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise StoreUnavailable("away")
        return await real(seq, limit)

    feed.join()
    await asyncio.sleep(0)
    monkeypatch.setattr(history, "events_after", flaky)
    history.append("tick")
    assert await read(feed, 0, 1) == [1]
    assert metrics.registry.get_sample_value("trainmedic_loop_errors_total", {"loop": "events"}) is None
    await feed.close()


async def test_listeners_are_limited() -> None:
    """One too many is told to come back."""
    feed = make(MemoryHistory(), listeners=1)
    feed.join()
    with pytest.raises(Saturated):
        feed.join()
    await feed.leave()
    feed.join()
    await feed.close()


async def test_closing_wakes_who_waits() -> None:
    """A stop of the server does not wait for a heartbeat."""
    feed = make(MemoryHistory())
    feed.join()
    waiting = asyncio.create_task(feed.after(0, 3600.0))
    await asyncio.sleep(0)
    await feed.close()
    assert await asyncio.wait_for(waiting, 60) == []


async def test_a_place_from_before_the_store_was_replaced_is_the_present() -> None:
    """Else the client would wait until the numbers had grown to its own."""
    history = MemoryHistory()
    history.append("tick")
    assert await make(history).start_of(999) == 1
    assert await make(history).start_of(0) == 0
    assert await make(history).start_of(None) == 1


async def test_few_listeners_read_from_the_history_at_one_time() -> None:
    """So that sixty replays from the beginning are batches between which other requests have their turn."""
    history = MemoryHistory()
    for _ in range(3 * feeds.BATCH):
        history.append("tick")
    reading = most = 0
    real = history.events_after

    async def counted(seq: int, limit: int) -> list[Event]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.001)
        reading -= 1
        return await real(seq, limit)

    history.events_after = counted  # type: ignore[method-assign]
    feed = make(history, listeners=60)
    for _ in range(60):
        feed.join()
    readers = [asyncio.create_task(read(feed, 0, 3 * feeds.BATCH)) for _ in range(60)]
    for reader in readers:
        assert await reader == list(range(1, 3 * feeds.BATCH + 1))
    await feed.close()
    assert most <= 3  # two listeners, and the poller
    assert feeds.BATCH <= 100
