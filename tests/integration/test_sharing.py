"""What the ranks of a job promise each other, rank by rank in threads, over PyTorch's own store in memory."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.support.messages import make_command
from tests.support.rank_threads import RankThread, RankThreads
from trainmedic import Rejected
from trainmedic.errors import NotAgreed
from trainmedic.ranks.rank_state import RankLost
from trainmedic.wire import envelope


def statuses(ranks: RankThreads, sent: envelope.Command) -> dict[int | None, str]:
    return {rank: reply.status for rank, reply in sorted(ranks.finals(sent).items(), key=str)}


def is_answered(ranks: RankThreads, sent: envelope.Command) -> bool:
    return len(ranks.finals(sent)) == ranks.size


# --- together -----------------------------------------------------------------------------------------------


def test_all_ranks_execute_the_same_commands_at_the_same_step_in_the_same_order() -> None:
    """Commands arrive at any time and ranks are late at random; each rank replies."""
    chance = random.Random(5)
    sent: list[envelope.Command] = []

    def loop(member: RankThread, step: int) -> None:
        time.sleep(chance.random() * 0.004)
        if member.rank == 0 and step % 7 == 0 and len(sent) < 30:
            sent.extend(ranks.send(make_command()) for _ in range(chance.randrange(3)))
        member.call(step)

    with RankThreads(3, every=2) as ranks:
        ranks.train(lambda: len(sent) >= 30 and all(is_answered(ranks, one) for one in sent), loop=loop)
    first, *others = [member.done for member in ranks.members]
    assert all(done == first for done in others)
    assert [identifier for _, identifier in first] == [one.id for one in sent]
    assert statuses(ranks, sent[0]) == dict.fromkeys(range(3), envelope.APPLIED)


def test_by_default_ranks_check_about_once_a_second() -> None:
    """However quick the steps are, a step costs nothing, and a command waits a second or so."""
    with RankThreads(2) as ranks:
        began = time.monotonic()
        ranks.train(lambda: time.monotonic() - began > 1.0)
        looks = [member.share._synchronizer.position for member in ranks.members]
    assert looks[0].number == looks[1].number < 40
    assert looks[0].calls > 10 * looks[0].number


def test_a_rank_whose_handler_fails_is_named() -> None:
    """The others have applied the command, and each reports it."""
    with RankThreads(3, every=1) as ranks:

        def break_down(_: Any) -> None:
            raise RuntimeError("out of memory")

        ranks.members[2].handlers.handlers["job.scale_lr"] = break_down
        sent = ranks.send(make_command())
        ranks.train(lambda: is_answered(ranks, sent))
    assert statuses(ranks, sent) == {0: "applied", 1: "applied", 2: "failed"}
    assert ranks.finals(sent)[2].output["reason"] == "RuntimeError: out of memory"


def test_a_value_is_chosen_once_and_every_rank_gets_all_answers() -> None:
    """`choose` calls only rank 0's function; `poll` has the same answer everywhere."""
    heard: dict[int, list[Any]] = {0: [], 1: [], 2: []}

    with RankThreads(3, every=1) as ranks:
        for member in ranks.members:

            def act(taken: Any, rank: int = member.rank) -> None:
                heard[rank].append(taken.group.choose(lambda: f"chosen by {rank}"))
                heard[rank].append(dict(taken.group.poll(rank * 10)))

            member.handlers.handlers["job.scale_lr"] = act
        sent = ranks.send(make_command())
        ranks.train(lambda: is_answered(ranks, sent))
    assert heard[0] == heard[1] == heard[2] == ["chosen by 0", {0: 0, 1: 10, 2: 20}]


def test_a_refusal_by_rank_0_applies_to_all() -> None:
    """If there is nothing to choose from, every rank answers the same."""

    def refuse() -> str:
        raise Rejected("there is no complete checkpoint")

    with RankThreads(2, every=1) as ranks:
        for member in ranks.members:
            member.handlers.handlers["job.scale_lr"] = lambda taken: taken.group.choose(refuse)
        sent = ranks.send(make_command())
        ranks.train(lambda: is_answered(ranks, sent))
    assert statuses(ranks, sent) == {0: "rejected", 1: "rejected"}
    assert ranks.finals(sent)[1].output["reason"] == "there is no complete checkpoint"


def test_a_rank_that_left_a_command_is_reported_missing_at_once() -> None:
    """If its handler has failed, the others do not wait for it in the rest of the command."""
    heard = {}

    with RankThreads(3, every=1) as ranks:
        for member in ranks.members:

            def act(taken: Any, rank: int = member.rank) -> None:
                if rank == 2:
                    raise OSError("the disk is full")
                heard[rank] = dict(taken.group.poll("written"))

            member.handlers.handlers["job.scale_lr"] = act
        sent = ranks.send(make_command())
        ranks.train(lambda: is_answered(ranks, sent), within=10)
    assert heard == {rank: {0: "written", 1: "written"} for rank in (0, 1)}


@pytest.mark.parametrize("patience", [30.0, float("inf")])
def test_ranks_meet_outside_of_commands_too(patience: float) -> None:
    """They use `Share.group` of the same name, once per use, however long they take."""
    heard: list[Any] = []

    def loop(member: RankThread, step: int) -> None:
        if step == 3:
            heard.append(dict(member.share.group("save-3").poll(member.rank, patience)))
        member.call(step)

    with RankThreads(2, every=1) as ranks:
        ranks.train(lambda: len(heard) == 2, loop=loop)
    assert heard == [{0: 0, 1: 1}] * 2


# --- all or none --------------------------------------------------------------------------------------------


def test_ranks_at_different_steps_apply_nothing_and_report_it() -> None:
    """A rank that counts otherwise is detected before anything is done."""

    def loop(member: RankThread, step: int) -> None:
        member.call(step + (member.rank == 1))

    with RankThreads(3, every=1) as ranks:
        sent = ranks.send(make_command())
        ranks.train(lambda: is_answered(ranks, sent), loop=loop)
    assert statuses(ranks, sent) == dict.fromkeys(range(3), envelope.FAILED)
    assert "rank 1 at step" in ranks.finals(sent)[0].output["reason"]
    assert "ranks 0, 2 at step" in ranks.finals(sent)[0].output["reason"]
    assert [member.done for member in ranks.members] == [[], [], []]


def test_a_command_missing_on_one_rank_is_executed_by_none() -> None:
    """A rank without the handler is named, and nothing is half done."""
    with RankThreads(3, every=1) as ranks:
        ranks.members[1].handlers.handlers = {"job.stop": lambda _: None}
        sent = ranks.send(make_command())
        ranks.train(lambda: is_answered(ranks, sent))
    assert statuses(ranks, sent) == dict.fromkeys(range(3), envelope.UNSUPPORTED)
    assert "rank 1: there is no handler of job.scale_lr" in ranks.finals(sent)[0].output["reason"]
    assert [member.done for member in ranks.members] == [[], [], []]


def test_a_command_waits_for_ranks_that_have_not_started_yet() -> None:
    """No command is announced before all are connected; if they never connect, the answer gives that reason."""
    with RankThreads(3, every=1, stores={2: HashStore()}) as ranks:
        ranks.members[2].share.close(0)
        sent = ranks.send(make_command(seconds=0.5))
        ranks.train(lambda: is_answered(ranks, sent), absent=(2,))
    assert statuses(ranks, sent) == dict.fromkeys(range(3), envelope.EXPIRED)
    assert ranks.finals(sent)[0].output["reason"] == "rank 2 did not join the others in time"


def test_a_missing_rank_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    """No rank applies the command then. No command is announced until that rank has moved on."""
    with RankThreads(3, every=1, call_patience=0.3) as ranks:
        ranks.train(lambda: all(member.step >= 5 for member in ranks.members))
        ranks.train(lambda: ranks.joined() == 2)
        sent = ranks.send(make_command(seconds=1.5))
        ranks.train(lambda: is_answered(ranks, sent), absent=(2,))
        assert statuses(ranks, sent) == dict.fromkeys(range(3), envelope.EXPIRED)
        assert "rank 2 did not come" in ranks.finals(sent)[0].output["reason"]
        assert [member.done for member in ranks.members] == [[], [], []]
    assert caplog.text.count("no command was carried out") == 1


def test_a_late_rank_executes_the_commands_that_came_after() -> None:
    """Once it has passed the sync point that it missed, commands are announced again."""
    late = threading.Event()

    def loop(member: RankThread, step: int) -> None:
        if member.rank == 1 and not late.is_set() and sent:
            late.set()
            time.sleep(0.8)
        member.call(step)

    sent: list[envelope.Command] = []
    with RankThreads(2, every=1, call_patience=0.3) as ranks:
        ranks.train(lambda: ranks.joined() == 1)
        sent.append(ranks.send(make_command()))
        ranks.train(lambda: is_answered(ranks, sent[0]), loop=loop)
    assert statuses(ranks, sent[0]) == {0: "applied", 1: "applied"}
    assert ranks.members[0].done == ranks.members[1].done


def test_a_command_that_has_expired_when_the_ranks_meet_is_not_applied() -> None:
    """Rank 0's clock decides for all of them."""

    def loop(member: RankThread, step: int) -> None:
        if member.rank == 0 and step == 3:
            sent.append(ranks.send(make_command(seconds=0.2)))
        if step in (4, 5):
            time.sleep(0.3)
        member.call(step)

    sent: list[envelope.Command] = []
    with RankThreads(2, every=1) as ranks:
        ranks.train(lambda: bool(sent) and is_answered(ranks, sent[0]), loop=loop)
    assert statuses(ranks, sent[0]) == dict.fromkeys(range(2), envelope.EXPIRED)


def test_an_undo_waits_until_every_rank_has_answered() -> None:
    """All ranks execute it; that of a command that was never applied has nothing to undo."""
    with RankThreads(2, every=1) as ranks:
        sent = ranks.send(make_command())
        undo = ranks.send(make_command(undo_of=sent.id))
        idle = ranks.send(make_command(undo_of=envelope.new_id()))
        ranks.train(lambda: all(is_answered(ranks, one) for one in (sent, undo, idle)))
    assert ranks.members[0].done == ranks.members[1].done
    assert [identifier for _, identifier in ranks.members[0].done] == [sent.id, undo.id]
    assert ranks.finals(idle)[1].output == {"nothing_to_undo": True, "known": "never_applied"}


# --- never in the way ---------------------------------------------------------------------------------------


def test_without_rank_0_the_others_wait_once_and_continue() -> None:
    """The total wait is bounded, and is not repeated."""
    with RankThreads(3, every=1, patience=0.3) as ranks:
        ranks.train(lambda: ranks.members[0].step >= 5)
        lost = ranks.members[0].share._synchronizer
        lost.end("killed")
        for member in ranks.members[1:]:
            member.waited = 0.0
        ranks.train(lambda: ranks.members[1].step > 300, absent=(0,))
    assert all(0.2 < member.waited < 3.0 for member in ranks.members[1:])
    assert ranks.members[1].share._synchronizer.position.number == ranks.members[2].share._synchronizer.position.number


def test_a_rank_0_that_was_only_slow_is_followed_again() -> None:
    """Once it is seen to move, commands are executed."""
    with RankThreads(2, every=1, patience=0.2) as ranks:
        ranks.train(lambda: ranks.members[0].step >= 3 and ranks.joined() == 1)
        # Rank 0 stands still while rank 1 goes on alone, and comes after.
        for _ in range(5):
            ranks.members[1].call(ranks.members[1].step + 1)
        for _ in range(5):
            ranks.members[0].call(ranks.members[0].step + 1)
        sent = ranks.send(make_command())
        ranks.train(lambda: is_answered(ranks, sent))
    assert statuses(ranks, sent) == {0: "applied", 1: "applied"}


class Stuck:
    """A store whose machine has gone without a word: its answers never come."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_stuck = threading.Event()
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            if self.is_stuck.is_set():
                self.over.wait(30)
                raise RuntimeError("Connection reset by peer")
            return real(*arguments)

        return call


def test_a_store_that_never_answers_delays_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread does not use it. It gives up permanently after a bounded time."""
    for module in (
        "trainmedic.ranks.synchronizer._STORE_GRACE",
        "trainmedic.ranks.synchronizer.JOIN_PATIENCE",
        "trainmedic.ranks.share.JOIN_PATIENCE",
    ):
        monkeypatch.setattr(module, 0.3)
    shared = HashStore()
    stuck = Stuck(shared)
    with RankThreads(2, stores={0: shared, 1: stuck}, store=shared, every=1, patience=0.1, call_patience=0.2) as ranks:
        ranks.train(lambda: ranks.members[0].step >= 5)
        stuck.is_stuck.set()
        ranks.members[1].waited = 0.0
        sent = ranks.send(make_command(seconds=1.0))
        ranks.train(lambda: ranks.members[1].step > 200 and is_answered(ranks, sent))
        stuck.over.set()
        assert ranks.members[1].waited < 2.0
        assert "has not answered" in ranks.members[1].share.state
    assert ranks.members[0].done == ranks.members[1].done == []


def test_a_lost_store_ends_sharing_but_not_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    """Every rank continues training; commands are answered with the reason."""
    shared = HashStore()
    stores = {rank: Stuck(shared) for rank in range(2)}
    with RankThreads(2, stores=stores, every=1) as ranks:
        ranks.train(lambda: ranks.members[0].step >= 5)
        for store in stores.values():
            store.over.set()
            store.is_stuck.set()
        ranks.train(lambda: ranks.members[0].step >= 500)
        sent = ranks.send(make_command())
        assert statuses(ranks, sent) == dict.fromkeys(range(2), envelope.FAILED)
    assert "the store that the ranks share is gone" in ranks.finals(sent)[0].output["reason"]
    assert [member.share.state != "on" for member in ranks.members] == [True, True]


def test_an_error_of_the_agreement_is_not_reported_as_a_lost_store(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RankThreads(2, every=1) as ranks:
        ranks.train(lambda: ranks.members[0].step >= 5)

        def broken(now: float) -> float:
            raise KeyError("commands")

        monkeypatch.setattr(ranks.members[1].share._synchronizer, "_work", broken)
        ranks.train(lambda: ranks.members[1].share.state != "on")
    assert ranks.members[1].share.state == "an unexpected error: KeyError: 'commands'"
    assert "the agreement of the ranks failed unexpectedly" in caplog.text
    assert "raise KeyError" in caplog.text


@pytest.mark.parametrize("answer", [None, "too late"])
def test_an_answer_after_the_loop_gave_up_is_not_an_error(
    answer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback in the job's log would report a fault that does not exist."""
    monkeypatch.setattr("trainmedic.ranks.synchronizer._STORE_GRACE", 0.1)
    answers = threading.Event()

    def slow(since: float, now: float) -> Any:
        answers.wait(30)
        return answer

    with RankThreads(1, every=1) as ranks:
        synchronizer = ranks.members[0].share._synchronizer
        with pytest.raises(RankLost, match="has not answered"):
            synchronizer.wait_for(slow, 0.1)
        answers.set()
        synchronizer._thread.join(30)
    assert "unexpectedly" not in caplog.text


def test_figures_that_cannot_be_measured_are_not_the_previous_ones(caplog: pytest.LogCaptureFixture) -> None:
    """One log line reports it, whenever it starts."""
    with RankThreads(1, every=1) as ranks:
        synchronizer = ranks.members[0].share._synchronizer
        figures: Any = {"cpu": 1.0}
        synchronizer._stats = lambda: figures
        synchronizer.published = {"loss": 2.0}
        ranks.train(lambda: synchronizer._status.stats == {"cpu": 1.0, "loss": 2.0})
        figures = None
        ranks.train(lambda: synchronizer._status.stats == {"loss": 2.0})
        beats = synchronizer._status.heartbeat
        ranks.train(lambda: synchronizer._status.heartbeat > beats)
        assert synchronizer._status.stats == {"loss": 2.0}
    assert caplog.text.count("cannot be measured") == 1


def test_a_restarted_job_does_not_read_what_its_former_life_wrote() -> None:
    """An agent's store outlives its workers, so it is the same. A hanging former rank 0 changes nothing."""
    shared = HashStore()
    former = RankThreads(2, store=shared, every=1)
    former.train(lambda: former.members[0].step >= 20)
    with RankThreads(2, store=shared, every=1) as ranks:
        sent = ranks.send(make_command())
        ranks.train(lambda: is_answered(ranks, sent))
    assert statuses(ranks, sent) == {0: "applied", 1: "applied"}
    with former:
        pass


def test_at_the_end_every_rank_leaves_at_once_and_pending_commands_are_answered() -> None:
    """Each rank replies, and no key is left to wait for."""
    ranks = RankThreads(2, every=1000)
    ranks.train(lambda: ranks.members[0].step >= 3)
    sent = ranks.send(make_command())
    began = time.monotonic()
    for member in reversed(ranks.members):
        member.share.close(60)
    assert time.monotonic() - began < 30
    assert statuses(ranks, sent) == dict.fromkeys(range(2), envelope.FAILED)
    assert "ended" in ranks.finals(sent)[0].output["reason"]


def test_when_rank_0_ends_the_others_stop_asking() -> None:
    """They do not wait even once."""
    with RankThreads(2, every=1) as ranks:
        ranks.train(lambda: ranks.members[0].step >= 3 and ranks.joined() == 1)
        ranks.members[0].share.close(1.0)
        ranks.members[1].waited = 0.0
        before = ranks.members[1].step
        ranks.train(lambda: ranks.members[1].step > before + 50, absent=(0,))
    assert ranks.members[1].waited < 1.0
    assert ranks.members[1].share.state == "rank 0 has ended"


def test_a_handler_without_its_peer_fails_and_the_loop_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is gone in the middle of a command: `poll` raises NotAgreed after a while and does not hang."""
    for name in (
        "synchronizer._STORE_GRACE",
        "participant.SILENT_AFTER",
        "participant.HEARTBEAT_EVERY",
        "participant.HEARTBEAT_OF_MANY",
        "synchronizer.HEARTBEAT_EVERY",
        "synchronizer.HEARTBEAT_OF_MANY",
        "rounds.RESULT_GRACE",
    ):
        monkeypatch.setattr(f"trainmedic.ranks.{name}", 0.3)
    caught: list[BaseException] = []

    with RankThreads(2, every=1, patience=0.3) as ranks:

        def act(taken: Any) -> None:
            try:
                taken.group.poll(patience=0.2)
            except NotAgreed as error:
                caught.append(error)
                raise

        def die(_: Any) -> None:
            ranks.members[0].share._synchronizer.end("killed")

        ranks.members[0].handlers.handlers["job.scale_lr"] = die
        ranks.members[1].handlers.handlers["job.scale_lr"] = act
        ranks.send(make_command())
        ranks.train(lambda: bool(caught), absent=())
        ranks.train(lambda: ranks.members[1].step > 50, absent=(0,))
    assert "rank 0 did not answer" in str(caught[0])


# --- figures ------------------------------------------------------------------------------------------------


def test_rank_0_has_the_figures_and_place_of_every_rank() -> None:
    """They arrive a moment after a rank has joined, or at its next sign of life."""
    with RankThreads(3, every=1) as ranks:
        for member in ranks.members:
            member.share.publish({"own_seconds": member.rank + 0.5})
        ranks.train(lambda: len(ranks.members[0].share.gather()) == 3)
        figures = ranks.members[0].share.gather()
        presence = ranks.members[0].share.describe()
        assert ranks.members[1].share.gather() == {}
    assert {rank: said.get("own_seconds") for rank, said in figures.items()}.keys() == {0, 1, 2}
    assert presence["ranks"] == [0, 1, 2]
    assert presence["placement"][2] == {"rank": 2, "node": "n2", "gpu": None}
