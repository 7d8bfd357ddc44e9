"""The rules by which a receiver deals with commands: what it does with one that has come, and what an undo finds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.support.messages import make_command
from trainmedic.wire import command_book, envelope
from trainmedic.wire.command_book import CommandDecision, CommandEffect, CommandRecord, Do

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
IN_TIME = make_command(expires_at=NOW + timedelta(seconds=1))
LATE = make_command(expires_at=NOW)
APPLIED = CommandRecord(envelope.APPLIED)
OPEN = CommandRecord(envelope.ACCEPTED)


def not_asked() -> None:
    raise AssertionError("it has a record, or came too late")


@pytest.mark.parametrize("command", [IN_TIME, LATE])
@pytest.mark.parametrize(
    ("record", "decision"),
    [
        (APPLIED, CommandDecision(Do.ANSWER, APPLIED)),
        (OPEN, CommandDecision(Do.WAIT)),
        (CommandRecord(envelope.ACCEPTED, is_ours=False), CommandDecision(Do.TAKE_OVER)),
        (CommandRecord(envelope.ACCEPTED, is_ours=False, is_forged=True), CommandDecision(Do.DROP)),
    ],
)
def test_a_record_decides_also_when_time_is_over(
    command: envelope.Command, record: CommandRecord, decision: CommandDecision
) -> None:
    """Nothing is refused or entered then."""
    assert command_book.admit(command, record, NOW, not_asked, not_asked) == decision


def test_what_comes_too_late_is_neither_refused_nor_entered() -> None:
    """Its time is over at the moment that it names."""
    decision = command_book.admit(LATE, None, NOW, not_asked, not_asked)
    assert decision.outcome is not None
    assert (decision.what, decision.outcome.status) == (Do.ANSWER, envelope.EXPIRED)


def test_a_command_is_entered_before_it_is_carried_out() -> None:
    """It is entered after the question whether it is refused, and what it has on record by then counts."""
    asked: list[str] = []

    def refusal() -> None:
        asked.append("refusal")

    def claim() -> None:
        asked.append("claim")

    assert command_book.admit(IN_TIME, None, NOW, refusal, claim) == CommandDecision(Do.CARRY_OUT)
    assert asked == ["refusal", "claim"]
    assert command_book.admit(IN_TIME, None, NOW, refusal, lambda: OPEN) == CommandDecision(Do.WAIT)
    refused = command_book.turn_away(envelope.REJECTED, "no room")
    assert command_book.admit(IN_TIME, None, NOW, lambda: refused, not_asked) == refused


@pytest.mark.parametrize(
    ("status", "effect"),
    [
        (envelope.ACCEPTED, CommandEffect.OPEN),
        (envelope.APPLIED, CommandEffect.POSSIBLE),
        (envelope.FAILED, CommandEffect.UNKNOWN),
        (envelope.REJECTED, CommandEffect.NONE),
        (envelope.UNSUPPORTED, CommandEffect.NONE),
        (envelope.EXPIRED, CommandEffect.NONE),
    ],
)
def test_what_an_undo_finds_of_a_known_command(status: str, effect: CommandEffect) -> None:
    """Of one that failed the receiver says it."""
    assert command_book.effect_of(CommandRecord(status), lambda: False, CommandEffect.UNKNOWN) is effect


@pytest.mark.parametrize(("is_covered", "effect"), [(True, CommandEffect.NONE), (False, CommandEffect.UNKNOWN)])
def test_what_an_undo_finds_of_an_unknown_command(is_covered: bool, effect: CommandEffect) -> None:
    """It never came only if it would be known."""
    assert command_book.effect_of(None, lambda: is_covered, CommandEffect.POSSIBLE) is effect
