"""Several filters at once: what seldom or never meets is found completely, in pages that end in time."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import at, closed
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.adapters.sql_store import history_cursor, history_search
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import Decision, Run, Status
from trainmedic_server.ports.store import HistoryFilter

STATUSES = (Status.SUCCEEDED, Status.FAILED, Status.OBSERVED)


def some_run(chance: random.Random) -> Run:
    minute = chance.choice((chance.randrange(5), chance.randrange(1_000)))
    target = chance.choice((Target(TargetKind.JOB, job="j1"), Target(TargetKind.GPU, node="n1", gpu="0"), None))
    made = closed(minute, target, playbook=chance.choice("ab"), status=chance.choice(STATUSES))
    touched = ("n1",) if target is not None and target.job and chance.random() < 0.3 else ()
    return replace(made, alert_name=chance.choice("xyz"), decision=chance.choice(list(Decision)[:4]), touched=touched)


def some_filter(chance: random.Random) -> HistoryFilter:
    wanted = HistoryFilter(playbook=chance.choice("ab"), alertname=chance.choice(("x", ("y", "z"))))
    return replace(
        wanted,
        status=chance.choice((None, "failed", ("succeeded", "observed"))),
        node=chance.choice((None, None, "n1")),
        is_open=chance.choice((None, False)),
        since=chance.choice((None, at(3))),
        until=chance.choice((None, at(600))),
    )


def meets(run: Run, wanted: HistoryFilter) -> bool:
    def among(value: str, choice: object) -> bool:
        return choice is None or value in (choice if isinstance(choice, tuple) else (choice,))

    return (
        among(run.playbook, wanted.playbook)
        and among(run.alert_name, wanted.alertname)
        and among(run.status.value, wanted.status)
        and (wanted.node is None or (run.target is not None and run.target.node == "n1") or "n1" in run.touched)
        and (wanted.since is None or run.created_at >= wanted.since)
        and (wanted.until is None or run.created_at < wanted.until)
    )


async def test_pages_of_several_filters_have_what_matches_all_of_them(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order and each once, also if a page's time is over after each window, and in one stream."""
    chance = random.Random(7)
    runs = [some_run(chance) for _ in range(120)]
    await store.transact(lambda tx: tx.add_runs(runs))
    await store.transact(lambda tx: [tx.touch_nodes(run.id, run.touched, at(0)) for run in runs if run.touched])
    for number in range(8):
        monkeypatch.setattr(history_search, "SECONDS", -1.0 if number % 2 else 1e9)
        wanted, cursor, seen = some_filter(chance), None, []
        while True:
            page, cursor = await store.page(wanted, 7, cursor)
            seen += page
            if cursor is None:
                break
        expected = sorted((run for run in runs if meets(run, wanted)), key=lambda run: (run.created_at, run.id))
        assert seen == expected[::-1], wanted
        assert [run async for run in store.stream(wanted)] == seen


async def test_a_page_ends_when_its_time_is_over(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is empty then, and its cursor continues from there; older runs come with the next pages."""
    monkeypatch.setattr(history_search, "SECONDS", -1.0)
    wanted = HistoryFilter(playbook="a", alertname="x")
    rare = replace(closed(0, playbook="a"), alert_name="x")
    await store.transact(lambda tx: tx.add_runs([rare, closed(timedelta(hours=9) // timedelta(minutes=1))]))
    first, cursor = await store.page(wanted, 10, None)
    assert first == []
    assert cursor is not None
    pages = 0
    while cursor is not None and not first:
        first, cursor = await store.page(wanted, 10, cursor)
        pages += 1
    assert first == [rare]
    assert pages > 1


async def test_a_search_continues_from_any_moment_that_a_cursor_can_name(store: SqlStore) -> None:
    run = closed(0, Target(TargetKind.GPU, node="n1", gpu="0"))
    await store.transact(lambda tx: tx.add_runs([run]))
    for moment, expected in ((datetime.max, [run]), (datetime.min, [])):
        cursor = history_cursor.encode(moment.replace(tzinfo=UTC), run.id)
        assert await store.page(HistoryFilter(node="n1"), 10, cursor) == (expected, None)
