"""What is known of whether an agent is there: since when it is lost, as people ask after a restart too. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

LOST_AFTER = timedelta(minutes=1)
"""How long nothing is heard of an agent until it counts as lost. A presence lives for 15 s."""
KEPT = timedelta(days=1)
"""Period for which a lost agent is reported as lost. Its node stays known for longer, for the retention of runs."""
SEEN_AGAIN = timedelta(minutes=10)
"""How often it is put on record that an agent is still there; after a restart it counts as heard of then."""


class AgentLife(Struct, frozen=True):
    """One agent, by the name of its node. Times are aware UTC datetimes."""

    name: str
    seen_at: datetime
    """When it was last heard of, as far as that is on record."""
    lost_at: datetime | None = None
    """When it was noticed that it is lost; None while it is there."""


class AgentChanges(Struct, frozen=True):
    """What a look at the agents changes."""

    save: tuple[AgentLife, ...] = ()
    forget: tuple[str, ...] = ()
    lost: tuple[AgentLife, ...] = ()
    returned: tuple[AgentLife, ...] = ()


def looked(
    known: Mapping[str, AgentLife],
    seen: Mapping[str, datetime],
    missing: Mapping[str, datetime],
    now: datetime,
    kept_since: datetime,
) -> AgentChanges:
    """What changes where the agents in `seen` are there, and those in `missing` were not for `LOST_AFTER`; each with
    when it was heard of last. Who was lost before `kept_since` is forgotten."""
    save, lost, returned, forget = [], [], [], []
    for name, at in seen.items():
        before = known.get(name)
        if before is None or before.lost_at is not None or at - before.seen_at >= SEEN_AGAIN:
            save.append(AgentLife(name, at))
        if before is not None and before.lost_at is not None:
            returned.append(AgentLife(name, at))
    for name, life in known.items():
        if life.lost_at is None and name in missing:
            lost.append(replace(life, seen_at=max(life.seen_at, missing[name]), lost_at=now))
        elif life.lost_at is not None and life.lost_at < kept_since and name not in seen:
            forget.append(name)
    return AgentChanges((*save, *lost), tuple(forget), tuple(lost), tuple(returned))
