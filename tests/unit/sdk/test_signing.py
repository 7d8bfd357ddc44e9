"""Signatures of messages, and the keys of jobs and nodes."""

from __future__ import annotations

import hashlib
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmedic.errors import ConfigurationError
from trainmedic.wire.signing import (
    BadSignature,
    Proof,
    Signer,
    identity_key,
    job_identity,
    node_identity,
    sign,
    signatures_of,
    unseal,
)

SHARED = b"the shared key of these tests"
RAW = b'{"at":"2026-01-31T12:00:00Z","job":"llm-1"}'


class Clock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_identity_key_is_an_hmac_of_the_identity() -> None:
    """So that another program can derive it too."""
    expected = hmac.new(SHARED, b"trainmedic identity job:llm-1", hashlib.sha256).hexdigest().encode()
    assert identity_key(SHARED, job_identity("llm-1")) == expected
    assert identity_key(SHARED, node_identity("llm-1")) != expected


def test_who_has_an_identity_key_speaks_for_this_identity_alone() -> None:
    """The server finds a message of llm-1 genuine as llm-1's, and as nobody else's."""
    server, job = Signer.of(SHARED), Signer.of(identity_key(SHARED, job_identity("llm-1")))
    signatures = job.sign(RAW)
    assert server.verify(RAW, signatures, job_identity("llm-1")) == Proof(is_previous=False)
    for identity in (job_identity("llm-2"), node_identity("llm-1"), None):
        with pytest.raises(BadSignature, match="wrong signature"):
            server.verify(RAW, signatures, identity)


def test_a_command_can_be_checked_with_either_key_and_with_no_other_identitys() -> None:
    """The server signs for the holder of the shared key, and for that of the receiver's own."""
    fields = {name: text.encode() for name, text in Signer.of(SHARED).fields(RAW, job_identity("llm-1")).items()}
    assert fields[b"signature"] == sign(RAW, SHARED).encode()
    for key in (SHARED, identity_key(SHARED, job_identity("llm-1"))):
        Signer.of(key).verify(RAW, signatures_of(fields))
    for key in (b"another", identity_key(SHARED, job_identity("llm-2"))):
        with pytest.raises(BadSignature):
            Signer.of(key).verify(RAW, signatures_of(fields))


def test_two_keys_overlap_while_one_takes_the_place_of_the_other() -> None:
    """Nobody has to change at the same moment: a server with both is understood by, and understands, old and new."""
    server = Signer.of(b"new", b"old")
    for key in (b"new", b"old"):
        for holder in (Signer.of(key), Signer.of(identity_key(key, job_identity("llm-1")))):
            holder.verify(RAW, server.sign(RAW, job_identity("llm-1")))
            proof = server.verify(RAW, holder.sign(RAW), job_identity("llm-1"))
            assert proof.is_previous == (key == b"old")
    with pytest.raises(BadSignature):
        server.verify(RAW, Signer.of(b"older").sign(RAW))


@pytest.mark.parametrize("signatures", [[], [""], ["\xe9"], ["0" * 64], [sign(RAW, SHARED).upper()], ["x"] * 100])
def test_what_is_no_signature_is_refused(signatures: list[str]) -> None:
    """Whatever stands there."""
    with pytest.raises(BadSignature):
        Signer.of(SHARED).verify(RAW, signatures)


def test_a_key_in_a_file_is_read_again_where_a_signature_is_wrong() -> None:
    """So a job goes on over an exchange of the key, and forged messages do not make it read at each of them."""
    clock, readings = Clock(), 0
    keys = [b"old"]

    def read_keys() -> list[bytes]:
        nonlocal readings
        readings += 1
        return list(keys)

    signer = Signer(read_keys, clock)
    keys[:] = [b"new"]
    clock.now += 10
    signer.verify(RAW, Signer.of(b"new").sign(RAW))
    assert readings == 2
    for _ in range(50):
        with pytest.raises(BadSignature):
            signer.verify(RAW, ["0" * 64])
    assert readings == 2


@pytest.mark.parametrize("keys", [(), (b"",), (b"key", b"")])
def test_an_empty_key_is_none(keys: tuple[bytes, ...]) -> None:
    """For everybody has it."""
    with pytest.raises(ValueError, match="empty"):
        Signer.of(*keys)


def test_a_key_that_cannot_be_read_again_stays() -> None:
    """A secret that is away for a moment stops nothing."""
    clock, is_there = Clock(), True

    def read_keys() -> list[bytes]:
        if not is_there:
            raise ConfigurationError("it is away")
        return [b"old"]

    signer = Signer(read_keys, clock)
    is_there = False
    clock.now += 100
    assert signer.sign(RAW) == [sign(RAW, b"old")]


@given(st.dictionaries(st.text(), st.text() | st.integers(), min_size=1), st.integers(1, 3))
def test_a_sealed_object_is_an_object_still(members: dict[str, str | int], keys: int) -> None:
    """Who does not know of seals reads it as before, and the seal is of exactly the rest."""
    members.pop("signature", None)
    raw = json.dumps({"at": "now", **members}).encode()
    signer = Signer.of(*(bytes([number]) * 16 for number in range(1, keys + 1)))
    sealed = signer.seal(raw, "a key")
    assert {name: value for name, value in json.loads(sealed).items() if name != "signature"} == json.loads(raw)
    taken = unseal(sealed)
    assert taken.raw == raw
    signer.verify_sealed(taken, "a key")
    for wrong in ("another key", ""):
        with pytest.raises(BadSignature):
            signer.verify_sealed(taken, wrong)
    with pytest.raises(BadSignature):
        signer.verify(taken.raw, taken.signatures)  # as a message of a stream


@given(st.binary(max_size=200))
def test_any_bytes_can_be_unsealed(value: bytes) -> None:
    """Where there is no seal they are what they are."""
    raw, signatures = unseal(value)
    assert signatures or raw == value
