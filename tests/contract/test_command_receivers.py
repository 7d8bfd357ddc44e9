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
    """By the same process and the next one, also after the command's expiry: it was applied in time."""
    command = receiver.command()
    first = receiver.ask(command)
    assert (first.status, receiver.done) == (envelope.APPLIED, [command.id])
    assert receiver.ask(command).output == first.output
    receiver.restart()
    advance(3600)
    last = receiver.ask(command)
    assert (last.status, last.output, receiver.done) == (envelope.APPLIED, first.output, [command.id])


def test_a_repeat_of_a_waiting_command_extends_its_time(receiver: Receiver, advance: Callable[[float], None]) -> None:
    """The command is carried out once, after its first expiry, and answered once."""
    command = receiver.send(receiver.command(seconds=60))
    receiver.send(later(command, 600))
    receiver.send(command)  # a repeat with less time takes none away
    advance(120)
    receiver.work()
    assert receiver.answered(command).status == envelope.APPLIED
    eventually(receiver.is_off_the_stream, 60, "an empty stream")
    receiver.work()
    assert receiver.done == [command.id]


def test_a_repeat_of_a_waiting_reading_gets_the_same_answer(tmp_path: Path, redis_url: str) -> None:
    """The worker queue would otherwise stop at the repeat, which has no waiting reading left."""
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


def test_a_forged_command_does_not_block_its_id(receiver: Receiver) -> None:
    """It is refused, and the genuine command with that id is carried out."""
    command = receiver.command()
    receiver.refuse(command)
    refused = receiver.answered(command)
    assert (refused.status, refused.is_to_genuine) == (envelope.REJECTED, False)
    assert receiver.ask(command).status == envelope.APPLIED
    assert receiver.done == [command.id]


# --- killed -----------------------------------------------------------------------------------------------


def test_a_receiver_killed_before_acting(receiver: Receiver) -> None:
    """An agent carries the command out at its next start. A job answers that it was interrupted, and does not."""
    command = receiver.send(receiver.command())
    receiver.restart()
    receiver.work()
    assert receiver.answered(command).status == (envelope.APPLIED if receiver.resumes else envelope.FAILED)
    assert receiver.done == ([command.id] if receiver.resumes else [])


def test_a_receiver_killed_while_acting(receiver: Receiver) -> None:
    """No outcome is recorded. An agent's executor gets the command again, because it can resume it."""
    command = receiver.send(receiver.command())
    receiver.is_killed_while_acting = True
    with pytest.raises(Killed):
        receiver.work()
    receiver.is_killed_while_acting = False
    receiver.restart()
    receiver.work()
    assert receiver.answered(command).status == (envelope.APPLIED if receiver.resumes else envelope.FAILED)
    assert receiver.done == [command.id] * (2 if receiver.resumes else 1)


def test_a_receiver_killed_before_its_answer_is_sent(receiver: Receiver) -> None:
    """The command is not repeated. An agent has recorded the outcome; a job lost it with the answer."""
    command = receiver.command()
    receiver.lose_replies()
    receiver.send(command)
    receiver.work()
    receiver.restart()
    receiver.work()
    assert receiver.answered(command).status == (envelope.APPLIED if receiver.resumes else envelope.FAILED)
    assert receiver.done == [command.id]


def test_a_command_of_a_killed_job_is_answered_after_its_expiry(
    receiver: Receiver, advance: Callable[[float], None]
) -> None:
    """There is exactly one outcome, and no effect after the command's expiry."""
    command = receiver.send(receiver.command(seconds=60))
    receiver.restart()
    advance(120)
    receiver.work()
    reply = receiver.answered(command)
    assert (reply.status, receiver.done) == (envelope.EXPIRED if receiver.resumes else envelope.FAILED, [])


def test_a_command_unfinished_after_a_kill_may_have_been_started(
    receiver: Receiver, advance: Callable[[float], None]
) -> None:
    """The answer reports a possible effect: the command expired before it could be resumed."""
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
    """The next process does not repeat it either."""
    command = receiver.command()
    receiver.ask(command)
    receiver.restart()
    undo = receiver.command(undo_of=command.id)
    assert receiver.ask(undo).status == envelope.APPLIED
    assert receiver.ask(undo).status == envelope.APPLIED
    assert receiver.done == [command.id, undo.id]


def test_an_undo_that_arrives_first_blocks_its_command(receiver: Receiver) -> None:
    """The next process blocks it as well."""
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
    """Only when that command has ended is it known whether there is something to undo."""
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
    """An executor that failed may have changed something on the node; a failed handler has not."""
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


def test_an_expired_command_has_nothing_to_undo_and_is_then_blocked(
    receiver: Receiver, advance: Callable[[float], None]
) -> None:
    """Before its undo it could have come again with more time."""
    command = receiver.send(receiver.command(seconds=60))
    advance(120)
    receiver.work()
    assert receiver.answered(command).status == envelope.EXPIRED
    undo = receiver.command(undo_of=command.id, seconds=600)
    assert receiver.ask(undo).output == NEVER_APPLIED
    assert receiver.ask(later(command)).status == envelope.REJECTED
    assert receiver.done == []


def test_lost_memory_is_not_reported_as_nothing_to_undo(receiver: Receiver) -> None:
    """The receiver knows only commands since its memory restarted, and cannot date an id of another kind."""
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


def test_a_command_that_arrives_too_late_may_come_again(receiver: Receiver) -> None:
    """It is not remembered, because it was never applied."""
    late = receiver.command(seconds=-1)
    assert receiver.ask(late).status == envelope.EXPIRED
    assert receiver.ask(later(late)).status == envelope.APPLIED
    assert receiver.done == [late.id]


def test_a_command_that_waited_too_long_may_come_again(receiver: Receiver, advance: Callable[[float], None]) -> None:
    """It may come to the same process and to the next one."""
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


def test_a_jumping_clock_applies_nothing_twice(receiver: Receiver, advance: Callable[[float], None]) -> None:
    """Set forward, the receiver refuses timely commands as late; set back, it answers from its record."""
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


def test_a_command_refused_for_lack_of_capacity_may_come_again(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is not remembered. A repeat of a waiting command needs no capacity."""
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


def test_only_one_of_two_processes_claims_a_command(redis_url: str) -> None:
    """Both had looked it up before. Neither a later claim nor an undo takes it from its owner."""
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


def test_an_outcome_missing_from_the_journal_is_known_to_the_process(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeat is answered with it, and an undo finds what there is to revert."""
    command = agent.send(agent.command())
    with agent.without_journal(monkeypatch):
        agent.work()
    assert agent.answered(command).status == envelope.APPLIED
    assert agent.ask(command).status == envelope.APPLIED
    undo = agent.command(undo_of=command.id)
    assert agent.ask(undo).output != NEVER_APPLIED
    assert agent.done == [command.id, undo.id]


def test_an_expiry_missing_from_the_journal_lets_the_command_come_again(
    agent: Agent, advance: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal still has it as open, but it was never applied."""
    command = agent.send(agent.command(seconds=60))
    advance(120)
    with agent.without_journal(monkeypatch):
        agent.work()
    assert agent.answered(command).status == envelope.EXPIRED
    assert agent.ask(later(command)).status == envelope.APPLIED
    assert agent.done == [command.id]


def test_a_command_repeated_after_such_an_expiry_is_carried_out_once(
    agent: Agent, advance: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it comes: a further repeat finds it open, and extends its time."""
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


def test_a_command_that_cannot_be_recorded_is_not_started(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered as failed, and may come again."""
    command = agent.command()
    with agent.without_journal(monkeypatch):
        assert agent.ask(command).status == envelope.FAILED
        assert agent.done == []
    assert agent.ask(command).status == envelope.APPLIED


def test_a_bug_in_an_executor_may_have_had_an_effect(agent: Agent) -> None:
    """The answer reports it, and the undo is carried out."""
    agent.outcome = "bug"
    command = agent.command()
    reply = agent.ask(command)
    assert (reply.status, reply.output["may_be_done"]) == (envelope.FAILED, True)
    agent.outcome = envelope.APPLIED
    undo = agent.command(undo_of=command.id)
    assert agent.ask(undo).output != NEVER_APPLIED
    assert agent.done == [undo.id]
