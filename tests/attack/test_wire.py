"""Commands, replies and presences that were changed at random: only what is genuine has an effect, and nothing raises.

Redis itself is left out here, so that very many can be tried; ``test_hostile_redis`` has it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.attack.effort import random_source, trials
from tests.attack.mutations import mutated
from tests.support.clocks import StoppedClock
from tests.support.messages import make_command
from trainmedic.wire import envelope
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.envelope import Command, Reply
from trainmedic.wire.receiver import Addressee, CommandReceiver, ReceivedCommand
from trainmedic.wire.signing import Signer, identity_key, job_identity
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import RedisOutage
from trainmedic_server.adapters.redis_inbox import ReplyInbox
from trainmedic_server.adapters.redis_presence_judge import PresenceJudge
from trainmedic_server.adapters.redis_replies import ReplyRouter
from trainmedic_server.api.jobs import JobList, JobView, members_of
from trainmedic_server.ports.fence import no_fence

SHARED = Signer.of(b"the shared key of these tests")
OTHERS = [
    Signer.of(b"made up"),
    Signer.of(identity_key(b"the shared key of these tests", job_identity("llm-2"))),
]
KEY = envelope.job_presence("llm-1")
NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
TRIALS = trials(2000, 100_000)


@pytest.fixture
def source() -> random.Random:
    return random_source()


def signatures(raw: bytes, genuine: dict[bytes, bytes], source: random.Random) -> dict[bytes, bytes]:
    """The fields that an attacker puts beside `raw`: none, those of a genuine message, his own, or nonsense."""
    match source.randrange(4):
        case 0:
            return {}
        case 1:
            return genuine
        case 2:
            return {name: text.encode() for name, text in source.choice(OTHERS).fields(raw).items()}
        case _:
            return {name: mutated(text, source) for name, text in genuine.items()}


def encoded(fields: dict[bytes, str]) -> dict[bytes, bytes]:
    return {name: text.encode() for name, text in fields.items()}


class Stream:
    """The stream of a receiver, which takes entries off it."""

    def xack(self, *_: object) -> int:
        return 1

    xdel = xack


class Consumer:
    """Keeps what it is handed as genuine."""

    def __init__(self) -> None:
        self.received: list[Command] = []

    def receive(self, received: ReceivedCommand) -> None:
        self.received.append(received.command)

    def refuse(self, received: ReceivedCommand, reason: str) -> None:
        assert reason

    def note_unreadable(self) -> None:
        pass


def test_only_a_genuine_command_is_carried_out(source: random.Random) -> None:
    """The command must match byte for byte what the server signed, and for this job."""
    consumer = Consumer()
    addressee = Addressee("job", "llm-1", "stream", "rank-0", "llm-1")
    receiver = CommandReceiver(RedisConnection(lambda: None, OutageLog("a test")), addressee, SHARED, consumer)
    sent = {command.encode(): command for job in ("llm-1", "llm-2") for command in [make_command(job=job)]}
    genuine = {raw: encoded(SHARED.fields(raw, job_identity("llm-1"))) for raw in sent}
    for _ in range(TRIALS):
        original = source.choice(list(sent))
        raw = mutated(original, source)
        fields = {source.choice([b"command", b"command", b"other"]): raw, **signatures(raw, genuine[original], source)}
        is_genuine = raw in sent and sent[raw].target["job"] == "llm-1" and has_signature(fields, genuine[raw])
        consumer.received.clear()
        receiver._take_safely(Stream(), b"1-0", fields)  # type: ignore[arg-type]
        assert consumer.received == ([sent[raw]] if is_genuine else []), fields


def has_signature(fields: dict[bytes, bytes], genuine: dict[bytes, bytes]) -> bool:
    """Whether the first of the genuine signatures, which is that by the reader's own key, is left, and the message is
    found: in a field of its own name, or in the only one that looks like an object."""
    is_found = {b"command", b"reply"} & fields.keys() or sum(text.lstrip()[:1] == b"{" for text in fields.values()) == 1
    words = b" ".join(fields.get(name, b"")[:2048] for name in (b"signature", b"more_signatures"))
    return bool(is_found) and genuine[b"signature"] in words.split()[:8]


def test_only_a_genuine_reply_is_an_outcome(source: random.Random) -> None:
    """It does not matter what else is on the reply stream."""
    metrics, clock = telemetry.Metrics(), StoppedClock(NOW)
    discarded: list[bytes] = []
    router = ReplyRouter(NOW - timedelta(hours=1), lambda _: None, discarded.extend, is_signed=True)
    outage = RedisOutage("a test", "redis://127.0.0.1", metrics.bus_errors)
    inbox = ReplyInbox(None, "a", router, clock, metrics, outage, SHARED, None, no_fence)  # type: ignore[arg-type]
    key = Signer.of(identity_key(b"the shared key of these tests", job_identity("llm-1")))
    raw = Reply("c1", "llm-1/0@host", envelope.APPLIED, 0, {"step": 7}, NOW, job="llm-1").encode()
    genuine = encoded(key.fields(raw))
    for number in range(TRIALS):
        changed = mutated(raw, source)
        fields = {source.choice([b"reply", b"reply", b"other"]): changed, **signatures(changed, genuine, source)}
        waiter = router.register("c1", NOW + timedelta(minutes=1), job_identity("llm-1"))
        inbox._take(str(number).encode(), fields)
        is_genuine = changed == raw and has_signature(fields, genuine)
        assert waiter.replies() == ((Reply.decode(raw),) if is_genuine else ()), fields
        router.unregister("c1", waiter)
        router.acknowledge("c1")
        router.take_unclaimed(NOW)


def strange_replies() -> Iterator[bytes]:
    """Genuine replies whose outputs are hard to keep."""
    for depth in (30, 260, 1500, 30_000):
        yield b'{"command_id":"c1","status":"applied","output":' + b'{"a":[' * depth + b"1" + b"]}" * depth + b"}"
    for text in (rb"\ud800", rb"\u0000", "\u202e", r"\u001b[2J"):
        value = text if isinstance(text, bytes) else text.encode()
        yield b'{"command_id":"c1","status":"applied","output":{"' + value + b'":"' + value + b'"}}'
    for number in (b"NaN", b"1e999", b"-Infinity", b"9" * 10_000):
        yield b'{"command_id":"c1","status":"applied","output":{"a":' + number + b"}}"


@pytest.mark.parametrize("raw", list(strange_replies()))
def test_a_malformed_reply_keeps_its_outcome(raw: bytes) -> None:
    """It can also be written to every database, and displayed."""
    reply = Reply.of_entry({b"reply": raw})
    assert reply.status == envelope.APPLIED
    text = json.dumps(dict(reply.output), allow_nan=False, ensure_ascii=False)
    assert b"\\u0000" not in text.encode()


def test_only_a_genuine_presence_is_trusted_and_any_can_be_displayed(source: random.Random) -> None:
    """``/jobs`` displays them, whatever they contain."""
    clock = StoppedClock(NOW)
    signers = [SHARED, Signer.of(identity_key(b"the shared key of these tests", job_identity("llm-1")))]
    details = {"job": "llm-1", "ranks": [0, 1], "placement": [{"rank": 0, "node": "n1", "gpu": "GPU-a"}]}
    raw = json.dumps({**details, "at": envelope.write_time(NOW)}).encode()
    for _ in range(TRIALS):
        judge = PresenceJudge(SHARED, clock, telemetry.Metrics()) if source.random() < 0.01 else SHARED_JUDGE
        sealed = source.choice(signers).seal(raw, KEY)
        value = mutated(sealed, source)
        if source.random() < 0.2:
            changed = mutated(raw, source) or b"{}"
            value = source.choice(OTHERS).seal(changed, KEY)
        presence = judge.presence_of(KEY, value)
        if presence.doubt is None:
            assert dict(presence.details) == json.loads(raw), value
        view = JobView(**members_of(presence, (), True))
        assert JobList(items=[view]).model_dump_json().encode()
        assert json.dumps(view.model_dump(mode="json"), allow_nan=False, ensure_ascii=False).encode()


SHARED_JUDGE: Any = PresenceJudge(SHARED, StoppedClock(NOW), telemetry.Metrics())
