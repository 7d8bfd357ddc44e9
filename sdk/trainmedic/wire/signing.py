"""Signatures, by which a receiver knows who wrote a message, although anybody may write to Redis.

A signature is the HMAC-SHA256 (RFC 2104) of exactly the bytes of a message, in lower-case hexadecimal. Whoever has
several keys signs with each of them, and a message is genuine if one of its signatures was made with one of the
reader's keys. So two keys can overlap while one takes the place of the other, and nobody has to change at the same
moment as anybody else.

The **shared key** is the server's; whoever has it is trusted with everything. From it follows an **identity key** for
each job and each node (`identity_key`), by which its holder can read commands to this job or node, and speak for it,
and for nobody else. The server signs with the shared key and the receiver's identity key, so a holder of either can
check a command.

An entry of a stream carries signatures in fields of their own (`Signer.fields`, `signatures_of`). A value of a key
carries them as the last member of its JSON object (`seal`, `unseal`). What is signed there begins with a line that has
the key: else somebody could put a genuine value under another key, or a genuine reply under any.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from functools import lru_cache
from typing import Callable, Iterable, Mapping, NamedTuple, Sequence

from trainmedic.errors import TrainmedicError

FIRST_FIELD = b"signature"
MORE_FIELD = b"more_signatures"
_MOST_SIGNATURES = 8
_READ_AGAIN_AFTER = 60.0
"""Seconds after which keys are read again though nothing is wrong with them."""
_READ_AGAIN_AT_ONCE_AFTER = 2.0
"""Seconds, at least, between two readings where signatures are wrong, which anybody can bring about."""
_SEAL_BEGINS = b',"signature":"'
_SEAL_ENDS = b'"}'
_SEAL = re.compile(rb"[0-9a-f ]{0,1024}")
_LONGEST_SEAL = 2048

log = logging.getLogger("trainmedic")

ReadKeys = Callable[[], Sequence[bytes]]


class BadSignature(ValueError):
    """A message has no signature, or none that was made with a key that is known here. The text is what the message
    does or is, without the message: ``has a wrong signature``."""


def sign(raw: bytes, key: bytes) -> str:
    """The signature of the bytes of a message: HMAC-SHA256 (RFC 2104), hexadecimal."""
    return hmac.digest(key, raw, hashlib.sha256).hex()


def job_identity(job: str) -> str:
    """The identity of a training job, to which an identity key belongs."""
    return f"job:{job}"


def node_identity(node: str) -> str:
    """The identity of the agent of a node."""
    return f"node:{node}"


def identity_key(shared_key: bytes, identity: str) -> bytes:
    """The key of one job or node: 64 hexadecimal digits, as text, because keys are given in variables and files.

    It is the HMAC-SHA256 of ``trainmedic identity <identity>``. No message can have this text, so no signature is
    ever such a key.
    """
    return sign(b"trainmedic identity " + identity.encode(), shared_key).encode()


@lru_cache(maxsize=32_768)
def _with_identity_keys(keys: tuple[bytes, ...], identity: str) -> tuple[bytes, ...]:
    return (*keys, *(identity_key(key, identity) for key in keys))


class Proof(NamedTuple):
    """By which kind of key a message is genuine."""

    is_previous: bool
    """Whether it is a key that is only accepted still, or follows from such a one."""


class Signer:
    """Signs messages, and checks those of others.

    ``read_keys`` returns the keys, the one in use first, then those that are only accepted still. It is asked again
    from time to time, and where a signature is wrong, so that a key in a file can be exchanged under a running
    process. Where it raises TrainmedicError then, the keys stay as they were. May be used by several threads.
    """

    def __init__(self, read_keys: ReadKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._read_keys = read_keys
        self._clock = clock
        self._keys = _checked(read_keys())
        self._read_at = clock()

    @classmethod
    def of(cls, *keys: bytes) -> Signer:
        """One whose keys stay what they are."""
        return cls(lambda: keys)

    def sign(self, raw: bytes, identity: str | None = None) -> list[str]:
        """The signatures of `raw` by each key; with `identity`, by its identity keys as well."""
        if self._clock() - self._read_at > _READ_AGAIN_AFTER:
            self._read_again()
        return [sign(raw, key) for key in self._keys_for(identity)]

    def fields(self, raw: bytes, identity: str | None = None) -> dict[bytes, str]:
        """The signatures of `raw` as fields of an entry in a stream."""
        first, *more = self.sign(raw, identity)
        return {FIRST_FIELD: first, MORE_FIELD: " ".join(more)} if more else {FIRST_FIELD: first}

    def seal(self, raw: bytes, key: str, identity: str | None = None) -> bytes:
        """`raw`, the bytes of a JSON object that has members, as the value of a Redis key: with one more member, its
        signatures for this key, as `sign` makes them."""
        signatures = " ".join(self.sign(_for_key(raw, key), identity)).encode()
        return raw[:-1] + _SEAL_BEGINS + signatures + _SEAL_ENDS

    def verify_sealed(self, sealed: Sealed, key: str, identity: str | None = None) -> Proof:
        """The same as `verify`, for the value of a Redis key. Raises BadSignature."""
        return self.verify(_for_key(sealed.raw, key), sealed.signatures, identity)

    def verify(self, raw: bytes, signatures: Iterable[str], identity: str | None = None) -> Proof:
        """By which kind of key `raw` is genuine. With `identity`, its identity keys count as well as the signer's own.
        Raises BadSignature."""
        sent = [signature.encode("ascii", "replace") for signature in signatures][:_MOST_SIGNATURES]
        if not sent:
            raise BadSignature("is not signed, and a signing key is in use here")
        proof = self._proof(raw, sent, identity)
        if proof is None and self._clock() - self._read_at > _READ_AGAIN_AT_ONCE_AFTER and self._read_again():
            proof = self._proof(raw, sent, identity)
        if proof is None:
            raise BadSignature("has a wrong signature")
        return proof

    def _keys_for(self, identity: str | None) -> tuple[bytes, ...]:
        return self._keys if identity is None else _with_identity_keys(self._keys, identity)

    def _proof(self, raw: bytes, sent: Sequence[bytes], identity: str | None) -> Proof | None:
        keys = self._keys_for(identity)
        own = len(keys) if identity is None else len(keys) // 2
        for number, key in enumerate(keys):  # the signer's own, then as many that follow from them
            expected = sign(raw, key).encode()
            if any(hmac.compare_digest(expected, signature) for signature in sent):
                return Proof(is_previous=number % own > 0)
        return None

    def _read_again(self) -> bool:
        """Read the keys again; return whether they have changed."""
        self._read_at = self._clock()
        try:
            keys = _checked(self._read_keys())
        except (TrainmedicError, ValueError) as error:
            log.warning("the signing keys could not be read again, and stay as they were: %s", error)
            return False
        has_changed = keys != self._keys
        if has_changed:
            self._keys = keys
        return has_changed


def _checked(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """Raises ValueError where a key is missing or empty: everybody has an empty one."""
    if not keys or not all(keys):
        raise ValueError("a signing key is empty")
    return tuple(keys)


def signatures_of(fields: Mapping[bytes, bytes]) -> list[str]:
    """The signatures in the fields of a stream's entry."""
    text = b" ".join(fields.get(name, b"")[:_LONGEST_SEAL] for name in (FIRST_FIELD, MORE_FIELD))
    return text.decode("ascii", "replace").split()


class Sealed(NamedTuple):
    """A value of a key, taken apart."""

    raw: bytes
    """The JSON object that was signed."""
    signatures: list[str]


def unseal(value: bytes) -> Sealed:
    """The object in `value` and its signatures; of a value that has none, the value itself."""
    begins_at = value.rfind(_SEAL_BEGINS, max(len(value) - _LONGEST_SEAL, 0))
    signatures = value[begins_at + len(_SEAL_BEGINS) : -len(_SEAL_ENDS)]
    if begins_at < 0 or not value.endswith(_SEAL_ENDS) or not _SEAL.fullmatch(signatures):
        return Sealed(value, [])
    return Sealed(value[:begins_at] + b"}", signatures.decode().split())


def _for_key(raw: bytes, key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape") + b"\n" + raw
