"""How many readers are served at one time, and what they are served."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.api_world import World, alert, payload
from tests.support.memory_api import MemoryHistory
from trainmedic_server.errors import Saturated
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.http.read_turns import MOST_PASSED_OVER, ReadTurns, note_reader
from trainmedic_server.live.events import EventLines


async def test_a_few_are_served_some_wait_and_the_rest_come_back_later() -> None:
    """A turn that ends goes to the next; one who gives up waiting takes none with him."""
    turns, go_on = ReadTurns(1, 2, "pages"), asyncio.Event()

    async def read() -> None:
        async with turns.take():
            await go_on.wait()

    reading, impatient, patient = (asyncio.create_task(read()) for _ in range(3))
    await asyncio.sleep(0)
    with pytest.raises(Saturated, match="pages"):
        await read()
    impatient.cancel()
    await asyncio.sleep(0)
    go_on.set()
    async with asyncio.timeout(60):
        await asyncio.gather(reading, patient)
        await read()
    assert impatient.cancelled()


async def test_who_may_act_comes_before_viewers_and_finds_a_turn_kept() -> None:
    """However many viewers read and wait; among viewers each name is served in turn."""
    turns, served = ReadTurns(2, 10, "pages"), []
    go_on = {name: asyncio.Event() for name in ("a1", "a2", "a3", "b1", "op1", "op2", "op3")}

    async def read(name: str, label: str, *, acts: bool) -> None:
        note_reader(name, acts=acts)
        async with turns.take():
            served.append(label)
            await go_on[label].wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for label in ("a1", "a2", "a3", "b1"):
            tasks.create_task(read(label[0], label, acts=False))
        await asyncio.sleep(0)
        assert served == ["a1"]  # viewers leave one turn free
        for label in ("op1", "op2", "op3"):
            tasks.create_task(read("op", label, acts=True))
        await asyncio.sleep(0)
        assert served == ["a1", "op1"]
        for label, now_served in (("a1", "op2"), ("op1", "op3"), ("op2", "a2"), ("a2", "b1"), ("b1", "a3")):
            before = len(served)
            go_on[label].set()
            while len(served) == before:
                await asyncio.sleep(0)
            assert served[-1] == now_served, served
        for event in go_on.values():
            event.set()


@pytest.mark.parametrize("at_once", [1, 2, 3])
async def test_operators_who_always_ask_do_not_stop_viewers(at_once: int) -> None:
    """A script with an operator's token may ask again as soon as it is answered."""
    turns, served = ReadTurns(at_once, 100, "pages"), []
    has_viewer = asyncio.Event()

    async def operator() -> None:
        note_reader("script", acts=True)
        while not has_viewer.is_set():
            async with turns.take():
                served.append("operator")
                await asyncio.sleep(0)

    async def viewer() -> None:
        note_reader("vera", acts=False)
        async with turns.take():
            has_viewer.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(10):
            tasks.create_task(operator())
        await asyncio.sleep(0)
        tasks.create_task(viewer())
    assert len(served) < 10 * MOST_PASSED_OVER


async def test_waiting_viewers_keep_no_operator_out() -> None:
    """Each kind has a waiting room of its own."""
    turns, go_on = ReadTurns(2, 1, "pages"), asyncio.Event()

    async def read(*, acts: bool) -> None:
        note_reader("op" if acts else "v", acts=acts)
        async with turns.take():
            await go_on.wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for acts in (False, False, True, True):
            tasks.create_task(read(acts=acts))
            await asyncio.sleep(0)
        for acts in (False, True):
            with pytest.raises(Saturated):
                await asyncio.create_task(read(acts=acts))
        go_on.set()


async def test_a_turn_that_was_given_to_somebody_who_left_goes_on() -> None:
    """No turn is lost between being given and being taken."""
    turns = ReadTurns(1, 5, "pages")

    async def read() -> None:
        async with turns.take():
            pass

    async with turns.take():
        leaving = asyncio.create_task(read())
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving})
    async with asyncio.timeout(60):
        await read()


async def test_pages_beyond_those_that_may_wait_are_503() -> None:
    """With Retry-After; the others are answered."""
    world = World(limits=ServerLimits(reads=1, waiting_reads=1))
    reading, go_on = asyncio.Event(), asyncio.Event()
    real = world.history.page

    async def slow(*arguments: object) -> object:
        reading.set()
        await go_on.wait()
        return await real(*arguments)  # type: ignore[arg-type]

    world.history.page = slow  # type: ignore[method-assign, assignment]
    async with world.client() as client:
        served = asyncio.create_task(client.get("/history"))
        await reading.wait()
        waiting = asyncio.create_task(client.get("/playbooks"))
        await asyncio.sleep(0.05)
        refused = await client.get("/history/a")
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        go_on.set()
        assert [(await answer).status_code for answer in (served, waiting)] == [200, 200]


async def test_exports_are_few_at_one_time_and_their_places_come_back() -> None:
    """Also that of an export of nothing, and of one that could not begin."""
    world = World(limits=ServerLimits(exports=1))
    accept = {"accept": "text/csv"}
    async with world.client() as client:
        for away in (False, True, False):
            world.history.away = away
            assert (await client.get("/history", headers=accept)).status_code == (503 if away else 200)
        await client.post("/webhook", json=payload())
        for _ in range(3):
            assert (await client.get("/history", headers=accept)).status_code == 200


async def test_a_page_of_large_runs_ends_early_and_goes_on_by_its_cursor() -> None:
    """Nothing is left out or shown twice."""
    world = World(limits=ServerLimits(page_bytes=300_000))
    async with world.client() as client:
        for number in range(6):
            alerts = [alert(labels={"alertname": "A", "node": f"n{number}-{n}", "x": "y" * 2000}) for n in range(50)]
            await client.post("/webhook", json=payload(*alerts))
        shown: list[str] = []
        pages, cursor = 0, None
        while pages == 0 or cursor:
            query = {"limit": "1000"} | ({"cursor": cursor} if cursor else {})
            page = (await client.get("/history", params=query)).json()
            shown += [item["run_id"] for item in page["items"]]
            pages, cursor = pages + 1, page["next"]
    assert (len(shown), len(set(shown)), pages) == (300, 300, 2)


def test_an_event_is_written_once_for_all_listeners() -> None:
    """The newest lines are kept, up to a bound of memory."""
    history = MemoryHistory()
    events = [history.append("tick", text="x" * 100) for _ in range(50)]
    written = EventLines(most_bytes=3000)
    lines = [written.line(event) for event in events]
    assert written.line(events[-1]) is lines[-1]
    assert written.line(events[0]) == lines[0]
    assert written.line(events[0]) is not lines[0]
