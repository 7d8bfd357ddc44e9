"""The wire format: what is written is read again, and what is not well-formed is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmedic.envelope import verify
from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command, EnvelopeError, Reply
from trainmedic.wire.reading import without_nul

TIMES = st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(9000, 1, 1), timezones=st.just(UTC))
IDS = st.text("0123456789abcdef-", min_size=1, max_size=128)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)


@given(IDS, st.text(), OBJECTS, OBJECTS, TIMES, st.none() | IDS)
def test_a_command_survives_an_encoding_round_trip(
    id_: str, text: str, target: dict[str, Any], params: dict[str, Any], time: datetime, undo_of: str | None
) -> None:
    """Its members may hold anything."""
    sent = Command(id_, text, target, params, text, text, text, time, time, undo_of)
    assert Command.decode(sent.encode()) == sent


@given(IDS, st.sampled_from(sorted(envelope.STATUSES)), st.none() | st.integers(0, 10**6), OBJECTS, TIMES)
def test_a_reply_survives_an_encoding_round_trip(
    id_: str, status: str, rank: int | None, output: dict[str, Any], time: datetime
) -> None:
    """Its members may hold anything; only NUL, which not every database takes, is replaced."""
    sent = Reply(id_, "llm-1/0@host", status, rank, without_nul(output), time, job="llm-1")
    assert Reply.decode(sent.encode()) == sent


@given(st.binary(max_size=200))
def test_bytes_that_are_no_envelope_are_rejected(raw: bytes) -> None:
    """All raise one kind of error."""
    for kind in (Command, Reply):
        with pytest.raises(EnvelopeError):
            kind.decode(raw)


@pytest.mark.parametrize("rank", ["1000001", "999999999"])
def test_a_rank_as_text_is_bounded_like_a_number(rank: str) -> None:
    with pytest.raises(EnvelopeError, match="at most 1000000"):
        Reply.of_entry({b"command_id": b"c1", b"status": b"applied", b"rank": rank.encode()})


def whole() -> dict[str, Any]:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    return dict(json.loads(Command("c1", "job.stop", {}, {}, "r1", "p", "Alert", at, at).encode()))


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("v", 2),
        ("id", 7),
        ("id", ""),
        ("id", "two words"),
        ("id", "line\n"),
        ("id", "x" * 129),
        ("undo_of", 7),
        ("undo_of", "two words"),
        ("target", []),
        ("params", None),
        ("issued_at", "now"),
        ("expires_at", "2026-01-31T12:00:00"),
        ("expires_at", "0001-01-01T00:00:00+23:59"),
        ("expires_at", 7),
    ],
)
def test_an_invalid_member_is_rejected(member: str, value: Any) -> None:
    """This happens before anything is done with it."""
    with pytest.raises(EnvelopeError):
        Command.decode(json.dumps({**whole(), member: value}).encode())


def test_unknown_members_are_ignored() -> None:
    """A newer server may send more."""
    assert Command.decode(json.dumps({**whole(), "colour": "red"}).encode()).id == "c1"


def test_a_signature_covers_exactly_these_bytes_and_this_key() -> None:
    """A changed byte, another key or no signature is rejected; without a key none is required."""
    signature = envelope.sign(b"command", b"key")
    verify(b"command", signature, b"key")
    verify(b"command", signature.encode(), b"key")
    verify(b"anything", None, None)
    for raw, given_, key in (
        (b"Command", signature, b"key"),
        (b"command", signature, b"another"),
        (b"command", "\xe9", b"key"),
        (b"command", "", b"key"),
        (b"command", None, b"key"),
    ):
        with pytest.raises(EnvelopeError):
            verify(raw, given_, key)


def test_the_signature_is_hmac_sha256() -> None:
    """This is test case 2 of RFC 4231."""
    assert envelope.sign(b"what do ya want for nothing?", b"Jefe") == (
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    )


def test_times_are_written_in_utc_to_the_microsecond() -> None:
    """They may have come in any time zone."""
    time = datetime(2026, 1, 31, 13, 0, 0, 1, tzinfo=timezone(timedelta(hours=1)))
    assert envelope.write_time(time) == "2026-01-31T12:00:00.000001Z"
    assert envelope.read_time("2026-01-31T13:00:00.000001+01:00") == time


def test_a_fork_generates_its_own_ids() -> None:
    """IDs drawn in advance are not used by both; within one millisecond only chance distinguishes IDs."""
    program = (
        "import os; from trainmedic.wire.envelope import new_id; new_id(0); child = os.fork();"
        "os.write(1, ' '.join([*(new_id(0) for _ in range(50)), chr(10)]).encode()); child and os.wait()"
    )
    argv = [sys.executable, "-c", program]
    made = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert len(made) == len(set(made)) == 100
