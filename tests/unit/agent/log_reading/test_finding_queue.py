"""The order in which findings of several users and jobs are sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.support.findings import of_kernel, of_training
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.database import AgentDatabase
from trainmedic_agent.log_reading import log_store
from trainmedic_agent.log_reading.budgets import NODE_ITSELF, BudgetOwner
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_agent.log_reading.finding_queue import FindingQueue
from trainmedic_agent.log_reading.finding_sender import FindingSender
from trainmedic_agent.log_reading.job_budgets import FindingsOfJobs
from trainmedic_agent.log_reading.log_counters import LogCounters
from trainmedic_agent.log_reading.log_store import LogStore, NodeBoot, OutgoingFinding
from trainmedic_agent.log_reading.rule_runner import RuleRunner
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding import Excerpt
from trainmedic_logs.lines.tracker import TrackerChanges

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BOOT = NodeBoot("n1", "boot-1", NOW)
MALLORY, BOB = 1001, 1002


def found(owner: BudgetOwner, number: int) -> OutgoingFinding:
    job = owner.job or "none"
    return OutgoingFinding(of_training(f"{job}-{number}", "n1", job, 1, NOW), owner=owner)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The first process."""
    made = Store(tmp_path)
    yield made
    made.close()


class Store:
    """The store of a reader, which can begin again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.begin()

    def begin(self) -> None:
        self.counters = LogCounters()
        self.database = AgentDatabase(self._directory)
        self.store = LogStore(self.database, BOOT, self.counters)

    def put(self, *findings: OutgoingFinding) -> None:
        self.store.commit({}, TrackerChanges({}), findings, NOW)

    def sent(self, most: int) -> list[str]:
        """Send a batch; return the rules of its findings."""
        batch = self.store.number_next(most)
        updates = [finding_codec.decode(body) for _, body in batch]
        assert [update.number for update in updates] == [number for number, _ in batch]
        self.store.delete_sent([number for number, _ in batch])
        return [update.finding.rule for update in updates]

    def close(self) -> None:
        self.database.close()

    def begin_again(self) -> None:
        """A process begins, after the one before has gone."""
        self.close()
        self.begin()


def test_a_job_with_many_findings_delays_no_other_user(store: Store) -> None:
    """The latest finding is in the next batch, however many of another user are waiting."""
    loud = BudgetOwner(MALLORY, "loud")
    store.put(*(found(loud, number) for number in range(1000)))
    store.put(found(BudgetOwner(BOB, "bobs"), 0), found(NODE_ITSELF, 0))
    assert {"bobs-0", "none-0"} <= set(store.sent(4))
    assert store.counters.findings_waiting == 998
    assert store.sent(4) == [f"loud-{number}" for number in range(2, 6)]


def test_a_job_delays_its_users_other_jobs_only_by_their_number(store: Store) -> None:
    """Each job of the user sends one finding in turn."""
    for job in ("first", "second"):
        store.put(*(found(BudgetOwner(MALLORY, job), number) for number in range(100)))
    store.put(found(BudgetOwner(MALLORY, "third"), 0))
    assert "third-0" in store.sent(3)


def test_the_user_served_longest_ago_comes_first() -> None:
    """If more users wait than fit into a batch, the others follow in later batches."""
    queue, counts = FindingQueue(), {BudgetOwner(uid, "j"): 100 for uid in range(7)}
    served = [owner.uid for _ in range(7) for owner in queue.shares(counts, 3)]
    assert [served.count(uid) for uid in range(7)] == [3] * 7
    assert served[:7] == [0, 1, 2, 3, 4, 5, 6]


def test_the_turns_survive_a_restart(store: Store) -> None:
    """A finding's owner and its place within its job are stored with it. Numbers continue."""
    store.put(*(found(BudgetOwner(MALLORY, "loud"), number) for number in range(10)))
    assert len(store.sent(2)) == 2
    store.put(found(BudgetOwner(BOB, "bobs"), 0))
    store.begin_again()
    ((first, _), _) = store.store.number_next(2)
    assert first == 3
    assert sorted(store.sent(2)) == ["bobs-0", "loud-2"]


def test_a_later_update_replaces_a_waiting_one(store: Store) -> None:
    """It keeps the excerpt of the earlier one. Updates in transit are not changed."""
    word = found(BudgetOwner(BOB, "bobs"), 0)
    store.put(OutgoingFinding(word.finding, Excerpt(("a",), 0), word.owner))
    store.put(word)
    ((number, body),) = store.store.number_next(5)
    assert finding_codec.decode(body).excerpt == Excerpt(("a",), 0)
    store.put(word)
    assert [each for each, _ in store.store.number_next(5)] == [number, number + 1]


def test_updates_without_capacity_leave_gaps_in_the_numbers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sees by the numbers that updates were lost."""
    (first,) = (found(BudgetOwner(BOB, "bobs"), 0),)
    store.put(first)
    assert store.sent(1) == ["bobs-0"]
    monkeypatch.setattr(log_store, "MOST_WAITING_BYTES", 0)
    store.put(*(found(BudgetOwner(BOB, "bobs"), number) for number in range(1, 4)))
    monkeypatch.undo()
    assert store.counters.findings_lost == 3
    store.put(found(BudgetOwner(BOB, "bobs"), 4))
    assert [number for number, _ in store.store.number_next(5)] == [5]


def test_an_unreadable_finding_delays_no_other(store: Store) -> None:
    """A user can name the directory of an attempt so that the server could not read its finding. It leaves out a
    number, and is counted over a restart."""
    unreadable = found(BudgetOwner(MALLORY, "loud"), 0)
    origin = replace(unreadable.finding.origin, attempt=999_999_999)
    unreadable = replace(unreadable, finding=replace(unreadable.finding, origin=origin))
    store.put(unreadable, found(BudgetOwner(BOB, "bobs"), 0))
    store.put(unreadable)  # a later word looks for the excerpt of the earlier one
    assert store.sent(2) == ["bobs-0"]
    store.put(found(BudgetOwner(BOB, "bobs"), 1))
    assert [number for number, _ in store.store.number_next(5)] == [3]
    assert store.counters.findings_lost == 1
    store.begin_again()
    assert store.counters.findings_lost == 1


def test_losses_of_two_threads_are_both_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader drops findings for lack of space; the sender drops an unreadable one before that is counted."""
    sender = threading.Thread(target=lambda: store.store.number_next(5))

    class Counters(LogCounters):
        _lost, _asked = 0, 0

        @property
        def findings_lost(self) -> int:
            count = self._lost
            self._asked += 1
            if self._asked == 2:  # The first asks within the transaction, the second counts.
                sender.start()
                sender.join(0.5)
            return count

        @findings_lost.setter
        def findings_lost(self, count: int) -> None:
            self._lost = count

    unreadable = found(BudgetOwner(MALLORY, "loud"), 0)
    origin = replace(unreadable.finding.origin, attempt=999_999_999)
    store.put(replace(unreadable, finding=replace(unreadable.finding, origin=origin)))
    ((size,),) = store.database.rows("SELECT SUM(size) FROM log_waiting")
    monkeypatch.setattr(log_store, "MOST_WAITING_BYTES", 2 * size)
    store.store._counters = counters = Counters()
    store.put(*(found(BudgetOwner(BOB, "bobs"), number) for number in range(3)))
    sender.join(60)
    store.begin_again()
    assert store.counters.findings_lost == counters.findings_lost == 4 - store.counters.findings_waiting > 1


def test_the_sender_continues_after_an_unexpected_error(store: Store) -> None:
    """Without it, all later findings would stay unsent, visible only in their number."""
    sent: list[int] = []
    has_sent, counters = threading.Event(), AgentCounters()

    class Port:
        def send_findings(self, updates: Sequence[tuple[int, bytes]]) -> None:
            if not counters.loop_errors.all():
                raise KeyError("an error that nobody expects")
            sent.extend(number for number, _ in updates)
            has_sent.set()

    store.put(found(BudgetOwner(BOB, "bobs"), 0))
    sender = FindingSender(Port(), store.store, threading.Event(), counters)
    sender.start()
    assert has_sent.wait(60)
    sender.stop(60)
    assert sent == [1]
    assert counters.loop_errors.all() == {"log-findings": 1}


def test_the_user_with_the_most_findings_makes_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no findings are accepted, those of other users and of the kernel stay, whatever their age."""
    store.put(found(NODE_ITSELF, 0), found(BudgetOwner(BOB, "bobs"), 0), found(BudgetOwner(MALLORY, "quiet"), 0))
    loud = [found(BudgetOwner(MALLORY, "loud"), number) for number in range(300)]
    ((size,),) = store.database.rows("SELECT SUM(size) FROM log_waiting")
    monkeypatch.setattr(log_store, "MOST_WAITING_BYTES", 5 * size)
    store.put(*loud)
    assert store.counters.findings_lost == 303 - store.counters.findings_waiting
    sent = store.sent(50)
    assert {"none-0", "bobs-0", "quiet-0", "loud-299"} <= set(sent)
    assert "loud-0" not in sent


def test_after_a_restart_no_job_uses_the_turns_of_the_node() -> None:
    """After a restart, only a finding's job is known. The kernel's findings keep their own turns."""
    of_jobs, loud = FindingsOfJobs(500, CutRecord()), found(BudgetOwner(MALLORY, "loud"), 0).finding
    assert of_jobs.owner_of(loud).uid not in {None, MALLORY}
    assert of_jobs.owner_of(of_kernel("gpu-xid", "n1", NOW)) == NODE_ITSELF


def test_the_state_of_an_earlier_release_is_migrated(store: Store) -> None:
    """That release wrote the whole state as one value. Rows from before it ran are stale then."""
    store.store.commit({}, TrackerChanges({1: '{"of": "this release"}'}), [], NOW)
    with store.database.transaction() as connection:
        value = json.dumps({"followed": [{"of": "the earlier one"}]})
        connection.execute("INSERT OR REPLACE INTO log_memory VALUES ('tracker', ?)", (value,))
    store.begin_again()
    assert store.store.tracker() == {1: {"of": "the earlier one"}}
    store.begin_again()
    assert store.store.tracker() == {1: {"of": "the earlier one"}}


def test_an_excerpt_stays_due_while_its_file_cannot_be_read() -> None:
    """The file is then closed, with what its stream still has to send."""

    def unreadable() -> dict[str, Any]:
        raise OSError("stale file handle")

    due = SimpleNamespace(due=1.0, place=0)
    source = SimpleNamespace(stream=SimpleNamespace(excerpts=[due]), place_json=unreadable, excerpt=lambda place: None)
    with pytest.raises(OSError, match="stale"):
        RuleRunner.add_excerpts(cast(Any, SimpleNamespace(_monotonic=lambda: 2.0)), cast(Any, source))
    assert source.stream.excerpts == [due]
