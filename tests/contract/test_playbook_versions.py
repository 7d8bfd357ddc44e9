"""The contract of `ports.playbook_versions.PlaybookVersions`, on each store."""

from __future__ import annotations

from tests.contract.run_store_values import at, closed, not_started
from trainmedic_server.adapters.sql_store.store import SqlStore


async def test_each_version_is_listed_with_the_runs_that_used_it(store: SqlStore) -> None:
    """Newest first; with its oldest and newest run, and decisions not to start one, of this playbook only."""
    runs = [
        closed(1, version="a"),
        not_started(2, version="a"),
        closed(3, version="b"),
        closed(4, version="a"),
        closed(5, version="a", playbook="heat"),
    ]
    await store.transact(lambda tx: [tx.keep_playbook("cool", version, version * 3, at(n)) for n, version in TEXTS])
    await store.transact(lambda tx: tx.keep_playbook("heat", "a", "heat", at(5)))
    for run in runs:
        await store.transact(lambda tx, run=run: tx.add_runs([run]))
    unused, newer, older = await store.used_versions("cool", 100)
    assert (unused.version, unused.runs, unused.last_used_at, unused.last_run) == ("c", 0, None, None)
    assert (newer.version, newer.runs, newer.first_run, newer.last_run) == ("b", 1, runs[2].id, runs[2].id)
    assert (older.version, older.first_used_at, older.last_used_at, older.runs) == ("a", at(1), at(4), 3)
    assert (older.first_run, older.last_run) == (runs[0].id, runs[3].id)
    _, _, bounded = await store.used_versions("cool", 2)
    assert (bounded.runs, bounded.first_run) == (1, runs[3].id)
    assert await store.text_of_version("cool", "a") == "aaa"
    assert await store.text_of_version("cool", "d") is None
    assert await store.used_versions("nothing", 100) == []


TEXTS = ((1, "a"), (3, "b"), (4, "c"))
