"""When a command is known to be answered by all who must, without another look at who is there."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from trainmedic.wire.envelope import APPLIED, Reply
from trainmedic_server.adapters import redis_replies
from trainmedic_server.adapters.redis_replies import ReplyRouter, ReplyWaiter


@pytest.mark.parametrize(
    ("rank", "ranks", "by_presence", "known"),
    [
        (None, None, None, True),  # an agent has no ranks
        (0, 1, None, True),  # the reply says how many there are
        (0, None, frozenset({0}), True),  # the presence does
        (0, None, None, False),  # a job of which neither is known: its presence has to be read
    ],
)
def test_who_answers_is_known_from_a_reply_or_from_the_presence(
    rank: int | None, ranks: int | None, by_presence: frozenset[int] | None, known: bool
) -> None:
    """A reply that comes before the presence was seen costs no reading of it, where it says itself how many answer."""
    waiter = ReplyWaiter(datetime(2026, 1, 1, tzinfo=UTC), "job:llm")
    waiter.expect(by_presence)
    waiter.offer(Reply("id", "llm/0", APPLIED, rank, at=datetime(2026, 1, 1, tzinfo=UTC), ranks=ranks))
    assert waiter.is_complete
    assert waiter.knows_who_answers is known


def test_a_command_with_too_many_early_replies_takes_those_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest gives way only to further commands."""
    monkeypatch.setattr(redis_replies, "EARLY_LIMIT", 2)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    router = ReplyRouter(now, lambda command: None, lambda entries: None)

    def take(command: str, rank: int) -> list[str]:
        router.take(f"{command}-{rank}".encode(), Reply(command, f"llm/{rank}", APPLIED, rank, at=now), now)
        return [reply.command_id for _, reply in router.take_unclaimed(now)]

    assert take("old", 0) == []
    assert [take("many", rank) for rank in range(3)] == [[], [], ["many"] * 3]
    assert take("new", 0) == []
    assert take("newest", 0) == ["old"]
