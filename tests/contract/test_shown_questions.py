"""`ports.chat`: what every run store promises of the messages that show questions."""

from __future__ import annotations

from msgspec.structs import replace

from tests.contract.run_store_values import at, closed
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.ports.chat import ShownQuestion


async def test_a_question_has_one_message_that_is_deleted_with_the_run(store: SqlStore) -> None:
    """Its record is replaced, and deleting an old run deletes it."""
    old, young = closed(1), closed(100)
    for each in (old, young):
        await store.transact(lambda tx, each=each: tx.add_runs([each]))  # type: ignore[misc]
    begun = ShownQuestion(old.id, "sure", "C1", "", "")
    other = ShownQuestion(young.id, "sure", "C1", "17.2", "x")
    posted = replace(begun, message="17.1", shown="y")
    for shown in (begun, other, posted):
        await store.transact(lambda tx, shown=shown: tx.shown_questions.save(shown))  # type: ignore[misc]
    assert await store.transact(lambda tx: tx.shown_questions.of_runs([old.id])) == [posted]
    assert await store.transact(lambda tx: tx.shown_questions.of_runs([])) == []
    assert await store.prune(at(50)) == 1
    assert await store.transact(lambda tx: tx.shown_questions.of_runs([old.id, young.id])) == [other]
