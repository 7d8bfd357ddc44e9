from __future__ import annotations

from msgspec import Struct


class Unresolved(Struct, frozen=True):
    reason: str  # ``target_unknown``, ``target_ambiguous`` or ``not_accepted``
    why: str
