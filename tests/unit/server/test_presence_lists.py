"""Pages of who is connected."""

from __future__ import annotations

import pytest

from tests.support.clocks import START
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.http.problems import HttpProblem
from trainmedic_server.live.presence_lists import PresenceLists, page
from trainmedic_server.ports.outside import Presence

NAMES = ["a", "b", "gpu-10", "gpu-9", "Ünit"]


class Bus:
    """Counts how often it is asked."""

    is_signed = False

    def __init__(self) -> None:
        self.asked = 0
        self.now = 0.0
        self.takes = 0.0
        self.uuid_of: dict[str, str] = {}

    async def agents(self) -> list[Presence]:
        self.asked, self.now = self.asked + 1, self.now + self.takes
        return [
            Presence(name, START, {"gpus": [{"uuid": self.uuid_of.get(name, "GPU-1")}]}) for name in reversed(NAMES)
        ]

    async def jobs(self) -> list[Presence]:
        self.asked, self.now = self.asked + 1, self.now + self.takes
        return [Presence(name, START) for name in NAMES]

    launchers = jobs


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 6])
async def test_the_pages_together_are_all_of_them_once(limit: int) -> None:
    """By name, and the last has no next."""
    listed = (await PresenceLists(SharedPresences(Bus(), lambda: 0.0)).agents()).presences  # type: ignore[arg-type]
    seen, cursor = [], None
    for _ in range(len(NAMES) + 1):
        shown = page(listed, limit, cursor, None)
        seen += [each.name for each in shown.presences]
        assert len(shown.presences) <= limit
        cursor = shown.next
        if cursor is None:
            break
    assert seen == sorted(NAMES)


async def test_one_that_goes_between_two_pages_moves_no_other() -> None:
    """The next page begins behind the last name that was shown, whether that is still there or not."""
    listed = (await PresenceLists(SharedPresences(Bus(), lambda: 0.0)).agents()).presences  # type: ignore[arg-type]
    first = page(listed, 2, None, None)
    left = [each for each in listed if each.name != first.presences[-1].name]
    assert [each.name for each in page(left, 2, first.next, None).presences] == ["gpu-10", "gpu-9"]


async def test_names_are_looked_up() -> None:
    """Those that are there."""
    listed = (await PresenceLists(SharedPresences(Bus(), lambda: 0.0)).agents()).presences  # type: ignore[arg-type]
    shown = page(listed, 10, None, ["gpu-9", "nobody", "a"])
    assert ([each.name for each in shown.presences], shown.next) == (["a", "gpu-9"], None)


@pytest.mark.parametrize("cursor", ["!", "ÿ", "_w", "a" * 5])
def test_a_cursor_that_nobody_gave_is_refused(cursor: str) -> None:
    """As that of the history is."""
    with pytest.raises(HttpProblem) as refused:
        page([], 1, cursor, None)
    assert refused.value.status == 422


async def test_what_takes_long_is_worked_out_once_for_each_reading() -> None:
    """Pages that are asked one after the other share it, and what contradicts whom is in it."""
    bus = Bus()
    bus.takes = 0.05
    lists = PresenceLists(SharedPresences(bus, lambda: bus.now))  # type: ignore[arg-type]
    first = await lists.agents()
    assert await lists.agents() is first
    jobs = await lists.jobs()
    assert await lists.jobs() is jobs
    assert bus.asked == 2
    assert first.against.keys() == set(NAMES)


async def test_where_nothing_has_moved_nothing_is_worked_out_anew() -> None:
    """A new reading is shown, with what was found before; another place of a GPU has it looked at again."""
    bus, now = Bus(), 0.0
    lists = PresenceLists(SharedPresences(bus, lambda: now))  # type: ignore[arg-type]
    first, now = await lists.jobs(), 100.0
    second = await lists.jobs()
    assert second.read is not first.read
    assert second.against is first.against
    assert second.agents is first.agents
    bus.uuid_of = {"a": "GPU-2"}
    now = 200.0
    assert (await lists.agents()).against.keys() == set(NAMES) - {"a"}
