"""Each command takes effect once and is answered, whoever receives it, whenever its process is killed.

The same promises for a node agent, which keeps its commands in SQLite, and for a training job, which keeps them in
Redis. Where the two differ the receiver says so (`Receiver.resumes` and its neighbours).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import redis

from tests.contract.command_receivers import Agent, Job, Killed, ReadingAgent, Receiver, later
from tests.support.programs import eventually
from trainmedic.wire import command_book, envelope
from trainmedic.wire.command_memory import CommandMemory

NEVER_APPLIED = {"nothing_to_undo": True, "known": "never_applied"}


@pytest.fixture(params=[Agent, Job])
def receiver(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> Iterator[Receiver]:
    made: Receiver = request.param(tmp_path / "state", redis_url)
    yield made
    made.close()


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the receiver's clock to so many seconds from the true time."""
    true_time = envelope.utc_now

    def set_clock(seconds: float) -> None:
        def shifted() -> datetime:
            return true_time() + timedelta(seconds=seconds)

        monkeypatch.setattr(envelope, "utc_now", shifted)

    return set_clock


# --- the same id again ------------------------------------------------------------------------------------


def test_a_repeat_is_answered_from_the_record(receiver: Receiver, advance: Callable[[float], None]) -> None:
    """By the same process, the next one, and after the command's time is over: it was applied in time."""
    command = receiver.command()
    first = receiver.ask(command)
    assert (first.status, receiver.done) == (envelope.APPLIED, [command.id])
    assert receiver.ask(command).output == first.output
    receiver.restart()
    advance(3600)
    last = receiver.ask(command)
    assert (last.status, last.output, receiver.done) == (envelope.APPLIED, first.output, [command.id])


def test_a_repeat_of_a_waiting_command_gives_it_more_time(receiver: Receiver, advance: Callable[[float], None]) -> None:
    """It is carried out once, after its first time is over, and answered once."""
    command = receiver.send(receiver.command(seconds=60))
    receiver.send(later(command, 600))
    receiver.send(command)  # a repeat with less time takes none away
    advance(120)
    receiver.work()
    assert receiver.answered(command).status == envelope.APPLIED
    eventually(receiver.is_off_the_stream, 60, "an empty stream")
    receiver.work()
    assert receiver.done == [command.id]


def test_a_repeat_of_a_waiting_reading_is_answered_with_it(tmp_path: Path, redis_url: str) -> None:
    """The worker queue would stop at the second, for which nothing waits any more."""
    agent = ReadingAgent(tmp_path / "state", redis_url)
    try:
        command = agent.send(agent.command())
        agent.send(command)
        agent.work()
        assert agent.answered(command).status == envelope.APPLIED
        eventually(agent.is_off_the_stream, 60, "an empty stream")
        assert agent.done == [command.id]
    finally:
        agent.close()


def test_a_forged_command_leaves_nothing_under_the_id_that_it_bears(receiver: Receiver) -> None:
    """It is refused, and the genuine command of that id is carried out."""
    command = receiver.command()
    receiver.refuse(command)
    refused = receiver.answered(command)
    assert (refused.status, refused.is_to_genuine) == (envelope.REJECTED, False)
    assert receiver.ask(command).status == envelope.APPLIED
    assert receiver.done == [command.id]


# --- killed -----------------------------------------------------------------------------------------------


def test_killed_before_it_acts(receiver: Receiver) -> None:
    """An agent carries it out at its next start. A job says that it was interrupted, and does not."""
    command = receiver.send(receiver.command())
    receiver.restart()
    receiver.work()
    assert receiver.answered(command).status == (envelope.APPLIED if receiver.resumes else envelope.FAILED)
    assert receiver.done == ([command.id] if receiver.resumes else [])


def test_killed_while_it_acts(receiver: Receiver) -> None:
    """The outcome is not on record. An agent's executor gets the command again, because it can resume it."""
    command = receiver.send(receiver.command())
    receiver.is_killed_while_acting = True
    with pytest.raises(Killed):
        receiver.work()
    receiver.is_killed_while_acting = False
    receiver.restart()
    receiver.work()
    assert receiver.answered(command).status == (envelope.APPLIED if receiver.resumes else envelope.FAILED)
    assert receiver.done == [command.id] * (2 if receiver.resumes else 1)


def test_killed_before_its_answer_is_sent(receiver: Receiver) -> None:
    """It has acted, and is not done again. An agent has the outcome on record; a job lost it with the answer."""
    command = receiver.command()
    receiver.lose_replies()
    receiver.send(command)
    receiver.work()
    receiver.restart()
    receiver.work()
    assert receiver.answered(command).status == (envelope.APPLIED if receiver.resumes else envelope.FAILED)
    assert receiver.done == [command.id]


def test_what_a_killed_job_had_is_answered_when_its_time_is_over(
    receiver: Receiver, advance: Callable[[float], None]
) -> None:
    """Exactly one outcome, and no effect after the time that the command had."""
    command = receiver.send(receiver.command(seconds=60))
    receiver.restart()
    advance(120)
    receiver.work()
    reply = receiver.answered(command)
    assert (reply.status, receiver.done) == (envelope.EXPIRED if receiver.resumes else envelope.FAILED, [])


def test_what_is_not_finished_after_a_kill_may_have_been_begun(
    receiver: Receiver, advance: Callable[[float], None]
) -> None:
    """The answer says so, because it had an effect: its time was over before it could be resumed."""
    command = receiver.send(receiver.command(seconds=60))
    receiver.is_killed_while_acting = True
    with pytest.raises(Killed):
        receiver.work()
    receiver.is_killed_while_acting = False
    receiver.restart()
    advance(120)
    receiver.work()
    reason = receiver.answered(command).output["reason"]
    assert "an earlier process of the agent may have begun it" in reason or "interrupted" in reason
    assert receiver.done == [command.id]


# --- undoing ----------------------------------------------------------------------------------------------


def test_an_undo_is_carried_out_once(receiver: Receiver) -> None:
    """Also by the next process."""
    command = receiver.command()
    receiver.ask(command)
    receiver.restart()
    undo = receiver.command(undo_of=command.id)
    assert receiver.ask(undo).status == envelope.APPLIED
    assert receiver.ask(undo).status == envelope.APPLIED
    assert receiver.done == [command.id, undo.id]


def test_an_undo_that_comes_first_bars_its_command(receiver: Receiver) -> None:
    """For the next process as well."""
    command = receiver.command()
    undo = receiver.command(undo_of=command.id)
    reply = receiver.ask(undo)
    assert (reply.status, reply.output) == (envelope.APPLIED, NEVER_APPLIED)
    refused = receiver.ask(command)
    assert (refused.status, refused.output["reason"]) == (
        envelope.REJECTED,
        "its undo came before it was applied",
    )
    receiver.restart()
    assert receiver.ask(command).status == envelope.REJECTED
    assert receiver.ask(undo).output == NEVER_APPLIED
    assert receiver.done == []


def test_an_undo_waits_for_the_command_before_it(receiver: Receiver) -> None:
    """Whether there is something to take back is known once that one has ended."""
    command = receiver.send(receiver.command())
    undo = receiver.send(receiver.command(undo_of=command.id))
    receiver.work()
    receiver.work()
    assert receiver.answered(undo).output != NEVER_APPLIED
    assert receiver.done == [command.id, undo.id]


def test_a_refused_command_has_nothing_to_undo(receiver: Receiver) -> None:
    """It never had an effect."""
    receiver.outcome = envelope.REJECTED
    command = receiver.command()
    assert receiver.ask(command).status == envelope.REJECTED
    receiver.outcome = envelope.APPLIED
    assert receiver.ask(receiver.command(undo_of=command.id)).output == NEVER_APPLIED
    assert receiver.done == []


def test_the_undo_of_a_failed_command(receiver: Receiver) -> None:
    """An executor that failed may have changed something on the node; a handler that failed has not."""
    receiver.outcome = envelope.FAILED
    command = receiver.command()
    assert receiver.ask(command).status == envelope.FAILED
    receiver.outcome = envelope.APPLIED
    undo = receiver.command(undo_of=command.id)
    reply = receiver.ask(undo)
    assert reply.status == envelope.APPLIED
    assert (receiver.done, reply.output == NEVER_APPLIED) == (
        ([undo.id], False) if receiver.failed_may_have_acted else ([], True)
    )


def test_an_expired_command_has_nothing_to_undo_and_is_barred_then(
    receiver: Receiver, advance: Callable[[float], None]
) -> None:
    """Until its undo it could have come again with more time."""
    command = receiver.send(receiver.command(seconds=60))
    advance(120)
    receiver.work()
    assert receiver.answered(command).status == envelope.EXPIRED
    undo = receiver.command(undo_of=command.id, seconds=600)
    assert receiver.ask(undo).output == NEVER_APPLIED
    assert receiver.ask(later(command)).status == envelope.REJECTED
    assert receiver.done == []


def test_a_lost_memory_does_not_say_that_there_is_nothing_to_undo(receiver: Receiver) -> None:
    """It knows what never came since it began anew, and by an id of another kind it knows nothing."""
    command = receiver.command()
    receiver.ask(command)
    receiver.begin_without_memory()
    forgotten = receiver.ask(receiver.command(undo_of=command.id))
    assert (forgotten.status, receiver.done) == (envelope.FAILED, [command.id])
    assert "does not know the command that is to be taken back" in forgotten.output["reason"]
    unseen = receiver.command()
    assert receiver.ask(receiver.command(undo_of=unseen.id)).output == NEVER_APPLIED
    assert receiver.ask(receiver.command(undo_of="another-kind-of-id")).status == envelope.FAILED


# --- time -------------------------------------------------------------------------------------------------


def test_what_comes_too_late_may_come_again(receiver: Receiver) -> None:
    """It is not remembered, because it was never applied."""
    late = receiver.command(seconds=-1)
    assert receiver.ask(late).status == envelope.EXPIRED
    assert receiver.ask(later(late)).status == envelope.APPLIED
    assert receiver.done == [late.id]


def test_what_waited_too_long_may_come_again(receiver: Receiver, advance: Callable[[float], None]) -> None:
    """To the same process, and to the next."""
    for _ in range(2):
        command = receiver.send(receiver.command(seconds=60))
        advance(120)
        receiver.work()
        assert receiver.answered(command).status == envelope.EXPIRED
        assert receiver.ask(later(command)).status == envelope.APPLIED
        assert receiver.done == [command.id]
        receiver.done.clear()
        advance(0)
        receiver.restart()


def test_a_clock_that_jumps_applies_nothing_twice(receiver: Receiver, advance: Callable[[float], None]) -> None:
    """Set forward, the receiver takes what is in time for late; set back, it answers from its record."""
    late, command = receiver.command(), receiver.command()
    advance(86_400)
    assert receiver.ask(late).status == envelope.EXPIRED
    advance(0)
    assert receiver.ask(command).status == envelope.APPLIED
    advance(-86_400)
    assert receiver.ask(command).status == envelope.APPLIED
    assert receiver.ask(late).status == envelope.APPLIED
    assert receiver.done == [command.id, late.id]


# --- room -------------------------------------------------------------------------------------------------


def test_what_finds_no_room_may_come_again(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is not remembered. A repeat of what waits needs no room."""
    monkeypatch.setattr(command_book, "MOST_WAITING", 2)
    waiting = [receiver.send(receiver.command()) for _ in range(2)]
    third = receiver.send(receiver.command())
    reply = receiver.answered(third)
    assert (reply.status, "wait" in reply.output["reason"]) == (receiver.full, True)
    receiver.send(waiting[0])
    receiver.work()
    assert receiver.ask(third).status == envelope.APPLIED
    assert receiver.done == [waiting[0].id, waiting[1].id, third.id]


# --- a job with two processes -----------------------------------------------------------------------------


def test_one_of_two_processes_enters_a_command(redis_url: str) -> None:
    """Both had looked it up before. Neither a later claim nor an undo takes it from the one that has it."""
    first, second = CommandMemory("job:llm-1", "first"), CommandMemory("job:llm-1", "second")
    with redis.Redis.from_url(redis_url) as client:
        assert first.claim(client, "c1") is None
        known = second.claim(client, "c1")
        assert known is not None
        assert (known.status, known.is_ours) == (envelope.ACCEPTED, False)
        second.revoke(client, "c1")
        assert second.look_up(client, "c1") == known


# --- an agent whose journal fails -------------------------------------------------------------------------


@pytest.fixture
def agent(tmp_path: Path, redis_url: str) -> Iterator[Agent]:
    made = Agent(tmp_path / "state", redis_url)
    yield made
    made.close()


def test_an_outcome_that_the_journal_could_not_take_is_known_to_the_process(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeat is answered with it, and an undo finds what there is to take back."""
    command = agent.send(agent.command())
    with agent.without_journal(monkeypatch):
        agent.work()
    assert agent.answered(command).status == envelope.APPLIED
    assert agent.ask(command).status == envelope.APPLIED
    undo = agent.command(undo_of=command.id)
    assert agent.ask(undo).output != NEVER_APPLIED
    assert agent.done == [command.id, undo.id]


def test_an_expiry_that_the_journal_could_not_take_lets_the_command_come_again(
    agent: Agent, advance: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the journal it is still open; it was never applied all the same."""
    command = agent.send(agent.command(seconds=60))
    advance(120)
    with agent.without_journal(monkeypatch):
        agent.work()
    assert agent.answered(command).status == envelope.EXPIRED
    assert agent.ask(later(command)).status == envelope.APPLIED
    assert agent.done == [command.id]


def test_a_command_that_comes_again_after_such_an_expiry_is_carried_out_once(
    agent: Agent, advance: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it comes: a further repeat finds it open, and gives it more time."""
    command = agent.send(agent.command(seconds=60))
    advance(120)
    with agent.without_journal(monkeypatch):
        agent.work()
    assert agent.answered(command).status == envelope.EXPIRED
    agent.send(later(command))
    agent.send(later(command, 600))
    advance(240)
    agent.work()
    assert agent.answered(command, 2).status == envelope.APPLIED
    assert agent.done == [command.id]


def test_what_cannot_be_written_down_is_not_begun(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered as failed, and may come again."""
    command = agent.command()
    with agent.without_journal(monkeypatch):
        assert agent.ask(command).status == envelope.FAILED
        assert agent.done == []
    assert agent.ask(command).status == envelope.APPLIED


def test_a_bug_of_an_executor_may_have_had_an_effect(agent: Agent) -> None:
    """The answer says so, and the undo is carried out."""
    agent.outcome = "bug"
    command = agent.command()
    reply = agent.ask(command)
    assert (reply.status, reply.output["may_be_done"]) == (envelope.FAILED, True)
    agent.outcome = envelope.APPLIED
    undo = agent.command(undo_of=command.id)
    assert agent.ask(undo).output != NEVER_APPLIED
    assert agent.done == [undo.id]
