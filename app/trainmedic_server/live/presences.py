"""Presences and their trust, as ``/agents`` and ``/jobs`` show them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from trainmedic_server.api.view import ApiModel
from trainmedic_server.ports.outside import Presence


class PresenceView(ApiModel):
    name: str
    last_seen: datetime
    details: dict[str, Any] = Field(description="Its ranks or GPUs, capabilities and version, for example.")
    believed: bool | None = Field(
        None, description="With a signing key: whether the present entry under its name in Redis is genuine."
    )
    doubts: list[str] = Field(
        [], description="Why it is not trusted, and contradictions by others: no action relies on it."
    )
    claims: dict[str, Any] = Field({}, description="Its untrusted entry in Redis.")
    signed_with: Literal["key", "previous key"] | None = Field(
        None, description="The signing key that it uses, during a rotation."
    )


def members_of(presence: Presence, contradictions: Sequence[str], is_signed: bool) -> dict[str, Any]:
    doubts = [*([presence.doubt] if presence.doubt is not None else []), *contradictions]
    members: dict[str, Any] = {
        "name": presence.name,
        "last_seen": presence.last_seen,
        "details": dict(presence.details),
    }
    if doubts:
        members["doubts"] = doubts
    if presence.claims:
        members["claims"] = dict(presence.claims)
    if is_signed:
        members["believed"] = presence.doubt is None
    if is_signed and presence.doubt is None:
        members["signed_with"] = "previous key" if presence.uses_previous_key else "key"
    return members
