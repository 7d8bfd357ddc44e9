# Public names of `wire.envelope`, and `verify`.

from __future__ import annotations

from trainmedic.wire.envelope import (
    ACCEPTED,
    APPLIED,
    EXPIRED,
    FAILED,
    FINAL,
    REJECTED,
    REPLIES,
    STATUSES,
    UNSUPPORTED,
    VERSION,
    Command,
    EnvelopeError,
    Reply,
    agent_presence,
    body_of,
    job_commands,
    job_presence,
    new_id,
    node_commands,
    read_time,
    sign,
    write_time,
)
from trainmedic.wire.signing import BadSignature, Signer

__all__ = [
    "ACCEPTED",
    "APPLIED",
    "EXPIRED",
    "FAILED",
    "FINAL",
    "REJECTED",
    "REPLIES",
    "STATUSES",
    "UNSUPPORTED",
    "VERSION",
    "Command",
    "EnvelopeError",
    "Reply",
    "agent_presence",
    "body_of",
    "job_commands",
    "job_presence",
    "new_id",
    "node_commands",
    "read_time",
    "sign",
    "verify",
    "write_time",
]


def verify(raw: bytes, signature: bytes | str | None, key: bytes | None) -> None:
    """Raise EnvelopeError for an invalid signature. Without a key everything passes."""
    if key is None:
        return
    text = signature.decode("ascii", "replace") if isinstance(signature, bytes) else signature
    try:
        Signer.of(key).verify(raw, [text] if text else [])
    except BadSignature as error:
        raise EnvelopeError(f"the command {error}") from error
