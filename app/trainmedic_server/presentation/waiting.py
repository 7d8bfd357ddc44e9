from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainmedic_core.words import count

Document = Mapping[str, Any]


class WaitingForPerson(Struct, frozen=True):
    approvals: Sequence[Document]
    failed: Sequence[Document]
    """Failed runs whose alert still fires."""

    def __len__(self) -> int:
        return len(self.approvals) + len(self.failed)

    def __str__(self) -> str:
        parts = ((self.approvals, "approval"), (self.failed, "failed run"))
        return ", ".join(count(len(entries), name) for entries, name in parts if entries) or "nothing"


def waiting_for_person(now: Document | None) -> WaitingForPerson:
    """`now` is the answer of ``GET /now``. Earlier servers send no failed runs."""
    now = now or {}
    return WaitingForPerson(now.get("approvals") or (), now.get("failed") or ())
