"""Signatures that prove a message's author, as any client can write to Redis.

A signature is the HMAC-SHA256 (RFC 2104) of a message's exact bytes, in lower-case hexadecimal. Senders sign with each
of their keys; one match suffices.

The server's **shared key** is trusted with everything. An **identity key** derived from it covers one job or node.
Values are signed with their Redis key's name, so that they cannot be copied.
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
_MOST_SIGNATURES = 8  # of a message; later ones are ignored
_READ_AGAIN_AFTER = 60.0  # seconds between two reads of the keys while signing
_READ_AGAIN_AT_ONCE_AFTER = 2.0  # seconds between two reads after wrong signatures, which any client can send
_SEAL_BEGINS = b',"signature":"'
_SEAL_ENDS = b'"}'
_SEAL = re.compile(rb"[0-9a-f ]{0,1024}")
_LONGEST_SEAL = 2048  # bytes at the end of a value in which the signatures are sought

log = logging.getLogger("trainmedic")

ReadKeys = Callable[[], Sequence[bytes]]


class BadSignature(ValueError):
    """A message has no valid signature. The text completes a sentence about it, such as ``has a wrong signature``."""


def sign(raw: bytes, key: bytes) -> str:
    return hmac.digest(key, raw, hashlib.sha256).hex()


def job_identity(job: str) -> str:
    return f"job:{job}"


def node_identity(node: str) -> str:
    return f"node:{node}"


def identity_key(shared_key: bytes, identity: str) -> bytes:
    """Return the key of one job or node: 64 hexadecimal digits, the HMAC-SHA256 of ``trainmedic identity <identity>``.
    No message has this text, so no signature equals such a key.
    """
    return sign(b"trainmedic identity " + identity.encode(), shared_key).encode()


@lru_cache(maxsize=32_768)
def _with_identity_keys(keys: tuple[bytes, ...], identity: str) -> tuple[bytes, ...]:
    return (*keys, *(identity_key(key, identity) for key in keys))


class Proof(NamedTuple):
    is_previous: bool
    """True for a key that is not the active one."""


class Signer:
    """Thread-safe signer and verifier.

    ``read_keys`` returns the active key, then older accepted ones. `sign` calls it each minute, `verify` after wrong
    signatures. If it then raises TrainmedicError, the keys stay.
    """

    def __init__(self, read_keys: ReadKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._read_keys = read_keys
        self._clock = clock
        self._keys = _checked(read_keys())
        self._read_at = clock()

    @classmethod
    def of(cls, *keys: bytes) -> Signer:
        return cls(lambda: keys)

    def sign(self, raw: bytes, identity: str | None = None) -> list[str]:
        if self._clock() - self._read_at > _READ_AGAIN_AFTER:
            self._read_again()
        return [sign(raw, key) for key in self._keys_for(identity)]

    def fields(self, raw: bytes, identity: str | None = None) -> dict[bytes, str]:
        first, *more = self.sign(raw, identity)
        return {FIRST_FIELD: first, MORE_FIELD: " ".join(more)} if more else {FIRST_FIELD: first}

    def seal(self, raw: bytes, key: str, identity: str | None = None) -> bytes:
        """Return the JSON object `raw` as a Redis key's value, with its signatures as last member."""
        signatures = " ".join(self.sign(_for_key(raw, key), identity)).encode()
        return raw[:-1] + _SEAL_BEGINS + signatures + _SEAL_ENDS

    def verify_sealed(self, sealed: Sealed, key: str, identity: str | None = None) -> Proof:
        return self.verify(_for_key(sealed.raw, key), sealed.signatures, identity)

    def verify(self, raw: bytes, signatures: Iterable[str], identity: str | None = None) -> Proof:
        """Return the kind of key that proves `raw`, maybe `identity`'s. Raises BadSignature."""
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
        # The own keys stay valid: the server's cover every identity, and a job or node may hold its derived key.
        return self._keys if identity is None else _with_identity_keys(self._keys, identity)

    def _proof(self, raw: bytes, sent: Sequence[bytes], identity: str | None) -> Proof | None:
        keys = self._keys_for(identity)
        own = len(keys) if identity is None else len(keys) // 2
        for number, key in enumerate(keys):  # the signer's own, then as many derived ones; the first of each is active
            expected = sign(raw, key).encode()
            if any(hmac.compare_digest(expected, signature) for signature in sent):
                return Proof(is_previous=number % own > 0)
        return None

    def _read_again(self) -> bool:
        self._read_at = self._clock()
        try:
            keys = _checked(self._read_keys())
        except (TrainmedicError, ValueError) as error:
            log.warning("cannot read the signing keys again; keeping the current ones: %s", error)
            return False
        has_changed = keys != self._keys
        if has_changed:
            self._keys = keys
        return has_changed


def _checked(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    if not keys or not all(keys):
        raise ValueError("a signing key is empty")
    return tuple(keys)


def signatures_of(fields: Mapping[bytes, bytes]) -> list[str]:
    text = b" ".join(fields.get(name, b"")[:_LONGEST_SEAL] for name in (FIRST_FIELD, MORE_FIELD))
    return text.decode("ascii", "replace").split()


class Sealed(NamedTuple):
    raw: bytes
    signatures: list[str]


def unseal(value: bytes) -> Sealed:
    begins_at = value.rfind(_SEAL_BEGINS, max(len(value) - _LONGEST_SEAL, 0))
    signatures = value[begins_at + len(_SEAL_BEGINS) : -len(_SEAL_ENDS)]
    if begins_at < 0 or not value.endswith(_SEAL_ENDS) or not _SEAL.fullmatch(signatures):
        return Sealed(value, [])
    return Sealed(value[:begins_at] + b"}", signatures.decode().split())


def _for_key(raw: bytes, key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape") + b"\n" + raw
