"""Kinds of history events about groups (`event_kinds`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmedic_server.domain.event_kinds import EventKind


class OfGroup(EventKind, frozen=True):
    """Groups. Members are target keys."""


class GroupFrozen(OfGroup, frozen=True):
    """The list of members is fixed. `members` and `left_out` (nodes whose GPUs are unknown) are the first 20."""

    selector: str
    total: int
    digest: str
    members: Sequence[str] = ()
    left_out: Sequence[str] = ()


class BatchStarted(OfGroup, frozen=True):
    """Members of a batch start. `members` are the first 20 of `count`."""

    batch: int
    count: int
    members: Sequence[str] = ()


class BatchEnded(OfGroup, frozen=True):
    """All members of a batch have closed. `exceptions` are the first 20 without success."""

    batch: int
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    cancelled: int = 0
    observed: int = 0
    exceptions: Mapping[str, str] = {}


class RolloutHeld(OfGroup, frozen=True):
    """No member can start now; the parent tries again."""

    why: str
