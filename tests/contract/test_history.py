"""`ports.History`: what every reader of the history promises."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.contract import run_store_values as values
from tests.contract.run_store_values import at, closed, event, gpu, heard, not_started, run
from trainmedic_core.target import PARTS, Target, TargetKind
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import Decision, OperatorOrder, OrderKind, Run, Status, UndoStatus
from trainmedic_server.ports.store import ActFilter, HistoryFilter, Transaction

Filter = HistoryFilter


async def add(store: SqlStore, *runs: Run) -> None:
    await store.transact(lambda tx: tx.add_runs(runs))


async def test_a_page_is_newest_first(store: SqlStore) -> None:
    """The order is that of creation, not of adding; without a next page there is no cursor."""
    old, middle, new = closed(1), closed(2), closed(3)
    await add(store, middle, new, old)
    assert await store.page(Filter(), 10, None) == ([new, middle, old], None)
    assert await store.page(Filter(), 3, None) == ([new, middle, old], None)


async def test_pages_follow_each_other_without_gap_or_overlap(store: SqlStore) -> None:
    """Also if many runs were created in the same moment."""
    runs = [closed(number // 5, gpu(number)) for number in range(23)]
    await add(store, *runs)
    seen: list[Run] = []
    cursor = None
    while True:
        page, cursor = await store.page(Filter(), 4, cursor)
        seen += page
        if cursor is None:
            break
        assert len(page) == 4
    assert seen == sorted(runs, key=lambda one: (one.created_at, one.id), reverse=True)


async def test_new_runs_never_shift_a_page(store: SqlStore) -> None:
    """The next page is the same whether or not runs were added in between."""
    first = [closed(number) for number in range(6)]
    await add(store, *first)
    _, cursor = await store.page(Filter(), 2, None)
    before = await store.page(Filter(), 2, cursor)
    await add(store, closed(100), closed(101))
    assert await store.page(Filter(), 2, cursor) == before == ([first[3], first[2]], before[1])


@pytest.mark.parametrize(
    "cursor", ["", "nonsense", "bm8gZG90", "MTIzLg", "å", "a" * 5000, "OTk5OTk5OTk5OTk5OTk5OTk5OTkueA"]
)
async def test_an_invalid_cursor_is_rejected(store: SqlStore, cursor: str) -> None:
    """It raises ValueError, which the caller reports to its own caller."""
    with pytest.raises(ValueError, match="not a cursor"):
        await store.page(Filter(), 2, cursor)


async def test_closed_runs_with_a_pending_undo_are_found(store: SqlStore) -> None:
    """Open runs are excluded: their undos are not known yet. The opposite filter returns the others."""
    owing = {
        status: closed(number, steps=(values.step(undo=values.undo(status)),))
        for number, status in enumerate(UndoStatus)
    }
    open_run = run(90, Target(TargetKind.NODE, node="node-7"), steps=(values.step(undo=values.undo()),))
    await add(store, *owing.values(), open_run)
    found, _ = await store.page(Filter(owes_undo=True), 100, None)
    assert {one.id for one in found} == {owing[status].id for status in (UndoStatus.ARMED, UndoStatus.RUNNING)}
    others, _ = await store.page(Filter(owes_undo=False), 100, None)
    assert len(others) == len(UndoStatus) - 1
    assert open_run.id in {one.id for one in others}


async def test_each_filter_matches_exactly(store: SqlStore) -> None:
    """Names must be equal; `since` is inclusive and `until` exclusive; filters combine."""
    on_gpu = closed(1, gpu(3, "node-7"))
    on_job = closed(2, Target(TargetKind.JOB, job="llm"), playbook="rollback", alert_name="TrainingLossSpike")
    refused = replace(not_started(3, Decision.TARGET_UNKNOWN), target=None)
    open_run = run(4, Target(TargetKind.NODE, node="node-7"))
    await add(store, on_gpu, on_job, refused, open_run)
    expected = [
        (Filter(alertname="TrainingLossSpike"), [on_job]),
        (Filter(playbook="rollback"), [on_job]),
        (Filter(status="succeeded"), [on_job, on_gpu]),
        (Filter(decision="target_unknown"), [refused]),
        (Filter(node="node-7"), [open_run, on_gpu]),
        (Filter(gpu="3"), [on_gpu]),
        (Filter(job="llm"), [on_job]),
        (Filter(since=at(2), until=at(4)), [refused, on_job]),
        (Filter(since=at(4)), [open_run]),
        (Filter(node="node-7", status="running"), [open_run]),
        (Filter(node="node-7", job="llm"), []),
        (Filter(playbook="cool' OR '1'='1"), []),
        (Filter(status="no such"), []),
    ]
    for wanted, found in expected:
        assert await store.page(wanted, 10, None) == (found, None), wanted
        assert [one async for one in store.stream(wanted)] == found, wanted


async def test_several_values_of_a_filter_are_alternatives(store: SqlStore) -> None:
    """Any of them matches, page by page in one order, also with many values and several filters at once."""
    statuses = (Status.SUCCEEDED, Status.FAILED, Status.CANCELLED)
    runs = [closed(number, gpu(number), status=statuses[number % 3]) for number in range(30)]
    await add(store, *runs)
    wanted = Filter(status=("failed", "cancelled", "failed"))
    found = [one for one in reversed(runs) if one.status in (Status.FAILED, Status.CANCELLED)]
    assert [one async for one in store.stream(wanted)] == found
    first, cursor = await store.page(wanted, 7, None)
    assert (first, (await store.page(wanted, 7, cursor))[0]) == (found[:7], found[7:14])
    both = Filter(status=("failed", "cancelled"), gpu=tuple(str(number) for number in range(12)))
    assert [one async for one in store.stream(both)] == [one for one in found if one.created_at < at(12)]
    many = Filter(status=("failed", "cancelled"), gpu=tuple(str(number) for number in range(20)))
    assert [one async for one in store.stream(many)] == [one for one in found if one.created_at < at(20)]


@pytest.mark.parametrize("part", PARTS)
async def test_runs_are_found_by_each_part_of_a_target(store: SqlStore, part: str) -> None:
    """Each part has its condition in ``sql_store/history_page``."""
    kinds = [kind for kind in TargetKind if part in kind.parts]
    wanted = [closed(number, Target(kind, **dict.fromkeys(kind.parts, "x"))) for number, kind in enumerate(kinds)]
    await add(store, closed(9, Target(TargetKind.CLUSTER)), *wanted)
    assert await store.page(Filter(**{part: "x"}), 10, None) == (wanted[::-1], None)


async def test_a_run_is_found_by_what_it_touches_and_by_who_decided(store: SqlStore) -> None:
    """By its target, by the nodes on which a job's run changed something, and by a GPU's name with its node."""
    on_job = closed(1, Target(TargetKind.JOB, job="llm"))
    on_gpu, elsewhere = closed(2, gpu(0, "node-7")), closed(3, gpu(0, "node-8"))
    open_run = run(4, Target(TargetKind.CLUSTER))
    await add(store, on_job, on_gpu, elsewhere, open_run)

    def work(tx: Transaction) -> None:
        tx.touch_nodes(on_job.id, ["node-7", "node-9"], at(1))
        tx.add_order(OperatorOrder("o1", on_gpu.id, OrderKind.APPROVE, "ann", at(5)))
        tx.add_order(OperatorOrder("o2", on_gpu.id, OrderKind.UNDO, "ann", at(6)))
        tx.add_order(OperatorOrder("o3", on_job.id, OrderKind.REJECT, "bob", at(6)))

    await store.transact(work)
    expected = [
        (Filter(node="node-7"), [on_gpu, on_job]),
        (Filter(node=("node-8", "node-9")), [elsewhere, on_job]),
        (Filter(gpu="gpu:node-7/0"), [on_gpu]),
        (Filter(gpu="node-8/0"), [elsewhere]),
        (Filter(gpu="0"), [elsewhere, on_gpu]),
        (Filter(target="gpu:node-7/0"), [on_gpu]),
        (Filter(target=("job:llm", "cluster")), [open_run, on_job]),
        (Filter(target="node:node-7"), []),
        (Filter(by="ann"), [on_gpu]),
        (Filter(by=("ann", "bob")), [on_gpu, on_job]),
        (Filter(is_open=True), [open_run]),
        (Filter(is_open=False, node="node-7"), [on_gpu, on_job]),
    ]
    for wanted, found in expected:
        assert [one.id async for one in store.stream(wanted)] == [one.id for one in found], wanted


async def test_a_filter_follows_a_runs_changes(store: SqlStore) -> None:
    """A run is found by its current status and decision."""
    one = run()
    await add(store, one)
    refused = replace(one, status=Status.NOT_STARTED, decision=Decision.TARGET_BUSY, ended_at=at(9))
    await store.transact(lambda tx: tx.save_runs([(refused, one)]))
    assert await store.page(Filter(status="running"), 10, None) == ([], None)
    assert await store.page(Filter(decision="target_busy"), 10, None) == ([refused], None)


async def test_a_stream_yields_everything_once(store: SqlStore) -> None:
    """However much it is, newest first; runs added meanwhile may be missing but do no harm."""
    runs = [closed(number / 100, gpu(number)) for number in range(1203)]
    await add(store, *runs)
    seen = []
    async for one in store.stream(Filter()):
        seen.append(one)
        if len(seen) == 100:
            await add(store, closed(5000))
    assert seen == runs[::-1]


async def test_a_record_contains_everything_about_a_run(store: SqlStore) -> None:
    """The run, its alerts in the order of tying, and its events and operator commands in the order of writing."""
    one, other = run(), run(target=gpu(1))
    first, second = heard("z"), heard("a", 1)
    order = OperatorOrder("o1", one.id, OrderKind.CANCEL, "kim", at(5))

    def work(tx: Transaction) -> None:
        tx.save_alerts([first, second])
        tx.add_runs([one, other])
        tx.link([(one.id, first.identity), (other.id, first.identity), (one.id, second.identity)])
        tx.append([event("started", one.id, 9), event("started", other.id), event("paused"), event("acted", one.id, 3)])
        tx.add_order(order)

    await store.transact(work)
    record = await store.record(one.id)
    assert record is not None
    assert record.run == one
    assert record.alerts == (first, second)
    assert [(kept.kind, kept.seq) for kept in record.events] == [("started", 1), ("acted", 4)]
    assert record.orders == (order,)
    assert await store.record("unknown") is None


async def test_events_come_in_the_order_of_their_numbers(store: SqlStore) -> None:
    """The query returns those after a number, up to a limit, in the order in which they were written."""
    assert await store.last_seq() == 0
    assert await store.events_after(0, 10) == []
    await store.transact(lambda tx: tx.append([event("a", minute=9), event("b", minute=5)]))
    await store.transact(lambda tx: tx.append([event("c", minute=1, n=1)]))
    assert [(one.kind, one.seq) for one in await store.events_after(0, 10)] == [("a", 1), ("b", 2), ("c", 3)]
    assert [one.kind for one in await store.events_after(1, 1)] == ["b"]
    assert await store.events_after(3, 10) == []
    assert await store.last_seq() == 3


async def test_events_of_given_kinds_come_in_the_order_of_their_numbers(store: SqlStore) -> None:
    """The query returns those after a number, up to a limit; other kinds are excluded."""
    await store.transact(lambda tx: tx.append([event(kind, minute=1) for kind in "abcabca"]))

    async def numbers(after: int, limit: int) -> list[int | None]:
        return [each.seq for each in await store.events_after(after, limit, {"a", "c"})]

    assert await numbers(0, 100) == [1, 3, 4, 6, 7]
    assert await numbers(1, 100) == [3, 4, 6, 7]
    assert await numbers(1, 2) == [3, 4]
    assert await store.events_after(0, 100, {"x"}) == []


async def test_a_listed_run_has_its_own_steps(store: SqlStore) -> None:
    """The runs of a page have their steps, in order, with ``on_failure`` last."""
    steps = (values.step(0), values.step(1), values.step(0, "on_failure"))
    one, other = closed(1, steps=steps), closed(2, steps=())
    await add(store, one, other)
    assert (await store.page(Filter(), 10, None))[0] == [other, one]


async def test_events_of_jobs_are_filtered_by_kind_time_and_job(store: SqlStore) -> None:
    """Oldest first, `since` inclusive, `until` exclusive; events of runs are excluded. The limit keeps the newest."""
    one = run()
    told = [event("job_failed", minute=number, job=f"llm-{number % 2}") for number in range(6)]
    of_a_run = event("job_failed", one.id, 3, job="llm-1")
    await add(store, one)
    await store.transact(lambda tx: tx.append([*told, of_a_run, event("paused", minute=3, job="llm-1")]))
    kinds = ("job_failed", "job_gone")

    async def numbers(*bounds: float, limit: int = 100, job: str | None = None) -> list[float]:
        begin, end = (at(bound) for bound in bounds)
        return [
            (each.at - at(0)).total_seconds() / 60 for each in await store.events_of_jobs(kinds, begin, end, limit, job)
        ]

    assert await numbers(0, 100) == [0, 1, 2, 3, 4, 5]
    assert await numbers(1, 4) == [1, 2, 3]
    assert await numbers(0, 100, job="llm-1") == [1, 3, 5]
    assert await numbers(0, 100, limit=2) == [4, 5]
    assert await numbers(0, 100, job="nobody") == []


async def test_many_events_of_jobs_are_read_completely(store: SqlStore) -> None:
    """Each is read once, also if more than a page of them have the same time."""
    told = [event("job_failed", minute=1, job="llm", number=number) for number in range(2500)]
    await store.transact(lambda tx: tx.append(told))
    read = await store.events_of_jobs(("job_failed",), at(0), at(2), 10_000)
    assert [each.data["number"] for each in read] == list(range(2500))


async def test_user_actions_are_filtered_by_actor_and_time(store: SqlStore) -> None:
    """Newest first, `since` inclusive, `until` exclusive, before a number; the server's actions are excluded."""
    acts = [replace(event("paused", minute=number), actor=("ann", "bob")[number % 2]) for number in range(6)]
    await store.transact(lambda tx: tx.append([*acts, event("resumed", minute=3)]))

    async def minutes(matching: ActFilter, before: int | None = None, limit: int = 100) -> list[float]:
        read = await store.acts_of_people(matching, before, limit)
        return [(each.at - at(0)).total_seconds() / 60 for each in read]

    assert await minutes(ActFilter()) == [5, 4, 3, 2, 1, 0]
    assert await minutes(ActFilter(since=at(1), until=at(4))) == [3, 2, 1]
    assert await minutes(ActFilter("ann", since=at(1), until=at(5))) == [4, 2]
    newest = await store.acts_of_people(ActFilter(), None, 2)
    assert await minutes(ActFilter(since=at(2)), newest[-1].seq, 1) == [3]


async def test_runs_are_found_by_their_alerts_name_from_before_mapping(store: SqlStore) -> None:
    """They share one paged order with runs of that name itself, with and without other filters."""
    sent = {"alertname": "CardHot", "card": "1"}
    runs = [
        closed(number, gpu(number), alert_name="GPUHot", original_labels=sent if number % 2 else None)
        for number in range(6)
    ]
    own = closed(6, gpu(6), alert_name="CardHot")
    await add(store, *runs, own)
    mapped = [own, runs[5], runs[3], runs[1]]
    assert await store.page(Filter(alertname="CardHot"), 10, None) == (mapped, None)
    assert mapped[1].original_labels == sent
    first, cursor = await store.page(Filter(alertname="CardHot"), 2, None)
    assert (first, (await store.page(Filter(alertname="CardHot"), 2, cursor))[0]) == (mapped[:2], mapped[2:])
    assert [one async for one in store.stream(Filter(alertname=["CardHot", "GPUHot"]))] == [own, *runs[::-1]]
    assert (await store.page(Filter(alertname="CardHot", gpu="3"), 10, None))[0] == [runs[3]]
    assert (await store.page(Filter(alertname="CardHot", playbook="other"), 10, None))[0] == []
