"""Which presences are believed, with a signing key and without."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trainmedic.wire import envelope
from trainmedic.wire.signing import Signer, identity_key, job_identity
from trainmedic.wire.writer import LARGEST_PRESENCE
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_presence_judge import COUNTS_FOR, OLDEST, PresenceJudge

SHARED = b"the shared key of these tests"
NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
KEY = envelope.job_presence("llm-1")


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = NOW

    def now(self) -> datetime:
        return self.time

    async def sleep_until(self, when: datetime) -> None:
        self.time = when


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def judge(clock: Clock) -> PresenceJudge:
    return PresenceJudge(Signer.of(SHARED), clock, telemetry.Metrics())


def presence(signer: Signer | None = None, at: datetime = NOW, key: str = KEY, **members: Any) -> bytes:
    raw = json.dumps({"job": "llm-1", "ranks": [0, 1], "at": envelope.write_time(at), **members}).encode()
    return raw if signer is None else signer.seal(raw, key)


def test_what_the_job_has_signed_is_believed(judge: PresenceJudge) -> None:
    """With the shared key or with its own."""
    for signer in (Signer.of(SHARED), Signer.of(identity_key(SHARED, job_identity("llm-1")))):
        believed = judge.presence_of(KEY, presence(signer))
        assert (believed.name, believed.last_seen, believed.doubt) == ("llm-1", NOW, None)
        assert believed.details["ranks"] == [0, 1]


OTHER = Signer.of(identity_key(SHARED, job_identity("llm-2")))
GENUINE = Signer.of(SHARED)


@pytest.mark.parametrize(
    ("value", "doubt"),
    [
        (presence(), "not signed"),
        (b"not JSON", "not signed"),
        (b"", "not signed"),
        (presence(Signer.of(b"made up")), "wrong signature"),
        (presence(OTHER), "wrong signature"),
        (presence(GENUINE, job="llm-2"), "another job: 'llm-2'"),
        (presence(GENUINE, job=None), "another job"),
        (GENUINE.seal(b'{"job":"llm-1"}', KEY), "does not say when"),
        (presence(GENUINE, key=envelope.job_presence("llm-2")), "wrong signature"),
        (presence(GENUINE, key=envelope.agent_presence("llm-1")), "wrong signature"),
        (presence(GENUINE, NOW - OLDEST - timedelta(seconds=5)), "125 s behind"),
        (presence(GENUINE, NOW + OLDEST + timedelta(seconds=5)), "125 s ahead of"),
        (presence(GENUINE).replace(b"[0, 1]", b"[0]"), "wrong signature"),
        (presence(GENUINE) + b" " * LARGEST_PRESENCE, "not signed"),
    ],
)
def test_anything_else_is_not(judge: PresenceJudge, value: bytes, doubt: str) -> None:
    """Nothing follows from what it says, and who looks sees why."""
    doubted = judge.presence_of(KEY, value)
    assert doubted.doubt is not None
    assert doubt in doubted.doubt
    assert doubted.details == {}
    assert judge.ranks_of(KEY, value) is None


def test_what_was_there_before_cannot_be_put_back(judge: PresenceJudge, clock: Clock) -> None:
    """Although it is genuine: there was a later one."""
    judge.presence_of(KEY, presence(GENUINE, NOW))
    clock.time += timedelta(seconds=30)
    judge.presence_of(KEY, presence(GENUINE, clock.time, ranks=[0]))
    replayed = judge.presence_of(KEY, presence(GENUINE, NOW))
    assert replayed.doubt == "it was put back by somebody, for there was a later one"
    assert replayed.details["ranks"] == [0]


def test_what_was_read_a_moment_ago_is_no_sign_of_anything(judge: PresenceJudge, clock: Clock) -> None:
    """While thousands are read, one of them is believed anew elsewhere: the newer counts."""
    clock.time += timedelta(seconds=5)
    judge.presence_of(KEY, presence(GENUINE, clock.time, ranks=[0]))
    older = judge.presence_of(KEY, presence(GENUINE, NOW))
    assert (older.doubt, older.last_seen, older.details["ranks"]) == (None, clock.time, [0])


def test_who_overwrites_a_presence_hides_nothing(judge: PresenceJudge, clock: Clock) -> None:
    """What was believed last counts for as long as it could be there, its ranks for longer: an answer of one of them
    must not pass for that of all."""
    judge.presence_of(KEY, presence(GENUINE))
    clock.time += timedelta(seconds=20)
    doubted = judge.presence_of(KEY, presence(ranks=[7]))
    assert (doubted.details["ranks"], doubted.claims["ranks"]) == ([0, 1], [7])
    clock.time += COUNTS_FOR
    doubted = judge.presence_of(KEY, presence(ranks=[7]))
    assert (doubted.details, doubted.claims["ranks"]) == ({}, [7])
    assert judge.ranks_of(KEY, presence(ranks=[7])) == judge.ranks_of(KEY, None) == frozenset({0, 1})


def test_without_a_key_everybody_is_believed(clock: Clock) -> None:
    """As the server says when it starts."""
    judge = PresenceJudge(None, clock, telemetry.Metrics())
    believed = judge.presence_of(KEY, presence(at=NOW - timedelta(days=1)))
    assert (believed.doubt, believed.details["ranks"]) == (None, [0, 1])
    assert judge.ranks_of(KEY, None) is None


def test_a_key_that_goes_out_of_use_is_told(clock: Clock) -> None:
    """So that it can be seen when nobody uses it any more."""
    judge = PresenceJudge(Signer.of(b"new", b"old"), clock, telemetry.Metrics())
    assert judge.presence_of(KEY, presence(Signer.of(b"old"))).uses_previous_key
    assert not judge.presence_of(KEY, presence(Signer.of(b"new"))).uses_previous_key


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is collected so deep in the stack that no call is left for its finalizer would fail whoever is tested."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("depth", [30, 300, 3000])
def test_a_strange_presence_can_be_shown(judge: PresenceJudge, clock: Clock, depth: int) -> None:
    """Deep, with half a surrogate pair, or with numbers that JSON does not have."""
    strange = b'{"job":"llm-1","a":' + b"[" * depth + b"]" * depth + rb',"b":"\ud800","c":NaN,"d":1e999}'
    for value in (strange, GENUINE.seal(strange, KEY)):
        shown = judge.presence_of(KEY, value)
        assert json.dumps([dict(shown.details), dict(shown.claims)], allow_nan=False, ensure_ascii=False).encode()
