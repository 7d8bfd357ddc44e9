"""`ports.verdicts`: what every run store promises of verdicts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from trainmedic_logs.domain.known_finding import KeptJob
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.adapters.sql_store.store import SqlStore

NOW = datetime(2026, 3, 1, 10, tzinfo=UTC)


def made(number: int, job: str = "llm-1", **members: object) -> KnownVerdict:
    """A verdict that began so many minutes after `NOW`."""
    began = NOW + timedelta(minutes=number)
    known = KnownVerdict(f"v{number}", job, number, began, began, "gpu", "high", "node-1", "gpu:xid", {"ranks": [3]})
    return replace(known, **members)  # type: ignore[arg-type]


async def test_a_verdict_is_stored_unchanged_and_replaced_by_its_id(store: SqlStore) -> None:
    """The newest of a job comes first, in transactions and for readers."""
    first, second, other = made(1), made(2, labels={"cause": "gpu"}, tell_at=NOW), made(3, job="llm-2")
    await store.transact(lambda tx: tx.verdicts.save([first, second, other]))
    again = replace(first, cause="code", node=None)
    await store.transact(lambda tx: tx.verdicts.save([again]))
    assert await store.transact(lambda tx: tx.verdicts.of_job("llm-1", 10, is_slow=False)) == [second, again]
    assert await store.verdicts_of("llm-1", 1) == [second]
    assert await store.verdicts_of("llm-1", 1, attempt=again.attempt) == [again]
    assert await store.verdicts_of("none", 1) == []
    records = await store.verdicts(NOW, NOW + timedelta(minutes=3))
    assert [(record.job, record.cause, record.at) for record in records] == [
        ("llm-1", "code", again.began_at),
        ("llm-1", "gpu", second.began_at),
    ]
    assert await store.verdicts(NOW, NOW + timedelta(hours=1), "llm-2") != []


async def test_slow_verdicts_and_failures_of_a_job_are_found_separately(store: SqlStore) -> None:
    """None of one kind replaces the other."""
    failures, slow = [made(1), made(2)], [made(number, fingerprint="slow:data") for number in (0, 3)]
    await store.transact(lambda tx: tx.verdicts.save([*failures, *slow]))
    assert await store.transact(lambda tx: tx.verdicts.of_job("llm-1", 2, is_slow=False)) == failures[::-1]
    assert await store.transact(lambda tx: tx.verdicts.of_job("llm-1", 1, is_slow=True)) == [slow[1]]


async def test_verdicts_that_name_a_node_are_found_by_it(store: SqlStore) -> None:
    """One of each job since a given time; those that name no node are excluded."""
    await store.transact(lambda tx: tx.verdicts.save([made(1), made(2, node=None), made(3, job="llm-2")]))
    found = await store.transact(lambda tx: tx.verdicts.on_node("node-1", NOW + timedelta(minutes=2)))
    assert [verdict.id for verdict in found] == ["v3"]
    assert await store.verdicts_on("node-1", NOW + timedelta(minutes=2)) == found
    await store.transact(lambda tx: tx.verdicts.save([made(number) for number in range(4, 120)]))
    assert [verdict.id for verdict in await store.verdicts_on("node-1", NOW)] == ["v119", "v3"]


async def test_due_reports_are_found_in_the_order_of_their_due_times(store: SqlStore) -> None:
    """Reports that are not due, or were sent for the last time, are excluded."""
    late, early = made(1, tell_at=NOW), made(2, tell_at=NOW - timedelta(seconds=1))
    waiting, told = made(3, tell_at=NOW + timedelta(seconds=1)), made(4)
    await store.transact(lambda tx: tx.verdicts.save([late, early, waiting, told]))
    assert await store.transact(lambda tx: tx.verdicts.to_tell(NOW, 10)) == [early, late]


async def test_old_verdicts_are_deleted_except_for_retained_jobs(store: SqlStore) -> None:
    """Those still to be reported stay, too."""
    kept, told, waiting = made(1, job="kept"), made(2), made(3, tell_at=NOW)
    await store.transact(lambda tx: tx.verdicts.save([kept, told, waiting]))
    await store.transact(lambda tx: tx.findings.keep_job(KeptJob("kept", None, "ada", NOW)))
    await store.prune(NOW + timedelta(days=1))
    assert await store.verdicts_of("kept", 10) == [kept]
    assert await store.verdicts_of("llm-1", 10) == [waiting]
