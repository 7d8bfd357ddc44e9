"""Detection of lost and returned agents."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

LOST_AFTER = timedelta(minutes=1)
"""Silence of a lost agent. A presence expires after 15 s."""
KEPT = timedelta(days=1)
"""Time for which a lost agent counts in the metric, and by default is remembered."""
STORED_EVERY = timedelta(minutes=10)
"""Interval at which a present agent's last report is stored."""


class AgentLife(Struct, frozen=True):
    """State of one agent. Times are aware UTC."""

    name: str
    seen_at: datetime  # last report; of a present agent, up to `STORED_EVERY` earlier
    lost_at: datetime | None = None  # None if present


class AgentChanges(Struct, frozen=True):
    """Agents to ``save`` or ``forget`` in the store, and those to report as ``lost`` or ``returned``."""

    save: tuple[AgentLife, ...] = ()
    forget: tuple[str, ...] = ()
    lost: tuple[AgentLife, ...] = ()
    returned: tuple[AgentLife, ...] = ()


def changes(
    known: Mapping[str, AgentLife],
    seen: Mapping[str, datetime],
    missing: Mapping[str, datetime],
    now: datetime,
    kept_since: datetime,
) -> AgentChanges:
    """`seen` and `missing` have the time of each agent's last report; those in `missing` were
    silent for `LOST_AFTER`. Agents lost before `kept_since` are forgotten.
    """
    save, lost, returned, forget = [], [], [], []
    for name, at in seen.items():
        before = known.get(name)
        if before is None or before.lost_at is not None or at - before.seen_at >= STORED_EVERY:
            save.append(AgentLife(name, at))
        if before is not None and before.lost_at is not None:
            returned.append(AgentLife(name, at))
    for name, life in known.items():
        if life.lost_at is None and name in missing:
            lost.append(replace(life, seen_at=max(life.seen_at, missing[name]), lost_at=now))
        elif life.lost_at is not None and life.lost_at < kept_since and name not in seen:
            forget.append(name)
    return AgentChanges((*save, *lost), tuple(forget), tuple(lost), tuple(returned))
