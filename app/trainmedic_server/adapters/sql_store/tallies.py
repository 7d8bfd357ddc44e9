"""Counting what the runs of each playbook came to, in one reading of a time. Who calls it: ``history``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store.effects import effects
from trainmedic_server.adapters.sql_store.schema import TimeColumn, orders, runs, steps
from trainmedic_server.domain.effect import EffectVerdict
from trainmedic_server.domain.run import OrderKind, Status, StepStatus
from trainmedic_server.ports.tallies import PlaybookTally

REPEATED_WITHIN = timedelta(hours=1)
_SECOND = 1_000_000
_SINCE, _UNTIL = sa.bindparam("since", type_=TimeColumn), sa.bindparam("until", type_=TimeColumn)
_IN_TIME = sa.and_(runs.c.created_at >= _SINCE, runs.c.created_at < _UNTIL)


def _microseconds(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return sa.type_coerce(column, sa.BigInteger)


_earlier = runs.alias("earlier")
# As constants, so that the partial indexes of started runs serve.
_WAS_STARTED, _EARLIER_WAS_STARTED = (
    sa.text(f"{table}.status <> '{Status.NOT_STARTED.value}'") for table in (runs.name, _earlier.name)
)
_TIMED_OUT = sa.exists().where(steps.c.run_id == runs.c.id, steps.c.status == StepStatus.TIMED_OUT.value)
_UNDONE = sa.exists().where(orders.c.run_id == runs.c.id, orders.c.kind == OrderKind.UNDO.value)
_REPEATED = sa.exists().where(
    _earlier.c.playbook == runs.c.playbook,
    _earlier.c.target_key == runs.c.target_key,
    _microseconds(_earlier.c.ended_at) <= _microseconds(runs.c.created_at),
    _microseconds(_earlier.c.ended_at)
    >= _microseconds(runs.c.created_at) - int(REPEATED_WITHIN.total_seconds()) * _SECOND,
    _EARLIER_WAS_STARTED,
    _earlier.c.status != Status.OBSERVED.value,
)
# Playbook by playbook, because the indexes that have all that is asked for begin with it.
_OF_PLAYBOOK = runs.c.playbook == sa.bindparam("playbook")
_NEXT_PLAYBOOK = sa.select(sa.func.min(runs.c.playbook)).where(runs.c.playbook > sa.bindparam("after"))
_HELD_BACK = sa.select(sa.func.count()).where(_OF_PLAYBOOK, runs.c.status == Status.NOT_STARTED.value, _IN_TIME)
_STARTED = sa.select(
    runs.c.status,
    _microseconds(runs.c.created_at).label("created_at"),
    _microseconds(runs.c.ended_at).label("ended_at"),
    _TIMED_OUT.label("timed_out"),
    _UNDONE.label("undone"),
    _REPEATED.label("repeated"),
).where(_OF_PLAYBOOK, _WAS_STARTED, _IN_TIME)
_BEGAN, _ENDED = _microseconds(steps.c.started_at).label("began"), _microseconds(steps.c.ended_at).label("ended")
_ANSWERED = (
    sa.select(_BEGAN, _ENDED)
    .join(steps, steps.c.run_id == runs.c.id)
    .where(_OF_PLAYBOOK, _WAS_STARTED, _IN_TIME, steps.c.kind == "approve")
    .where(steps.c.status.in_([StepStatus.SUCCEEDED.value, StepStatus.REJECTED.value]))
    .where(steps.c.started_at.is_not(None), steps.c.ended_at.is_not(None))
)
_EFFECTS = (
    sa.select(effects.c.playbook, effects.c.verdict, sa.func.count().label("runs"))
    .where(effects.c.acted_at >= _SINCE, effects.c.acted_at < _UNTIL)
    .group_by(effects.c.playbook, effects.c.verdict)
)
_VERDICTS = (
    sa.select(effects.c.run_id, effects.c.verdict)
    .where(effects.c.acted_at >= _SINCE, effects.c.acted_at < _UNTIL)
    .order_by(effects.c.acted_at.desc())
    .limit(sa.bindparam("limit"))
)


def tally(connection: sa.Connection, since: datetime, until: datetime) -> dict[str, PlaybookTally]:
    """What the runs that were created in this time came to."""
    time = {"since": since, "until": until}
    tallies: dict[str, PlaybookTally] = defaultdict(PlaybookTally)
    for playbook in _playbooks(connection):
        of_playbook = _tally_of(connection, {**time, "playbook": playbook})
        if of_playbook.statuses:
            tallies[playbook] = of_playbook
    for row in connection.execute(_EFFECTS, time):
        tallies[row.playbook].effects[EffectVerdict(row.verdict)] += row.runs
    return dict(tallies)


def _playbooks(connection: sa.Connection) -> Iterator[str]:
    """All that have runs, each found by one look into an index."""
    playbook: str | None = ""
    while (playbook := connection.execute(_NEXT_PLAYBOOK, {"after": playbook}).scalar()) is not None:
        yield playbook


def _tally_of(connection: sa.Connection, which: Mapping[str, Any]) -> PlaybookTally:
    tally = PlaybookTally()
    if held_back := connection.execute(_HELD_BACK, which).scalar_one():
        tally.statuses[Status.NOT_STARTED] = held_back
    for row in connection.execute(_STARTED, which):
        status = Status(row.status)
        tally.statuses[status] += 1
        if status is Status.OBSERVED:
            continue
        tally.timed_out += bool(row.timed_out)
        tally.undone_by_hand += bool(row.undone)
        tally.repeated += bool(row.repeated)
        if status is Status.SUCCEEDED and row.ended_at is not None:
            tally.repair_seconds.append((row.ended_at - row.created_at) / _SECOND)
    tally.person_seconds += [(row.ended - row.began) / _SECOND for row in connection.execute(_ANSWERED, which)]
    return tally


def verdicts(connection: sa.Connection, since: datetime, until: datetime, limit: int) -> dict[str, EffectVerdict]:
    """The verdicts on the runs that acted in this time, by run."""
    rows = connection.execute(_VERDICTS, {"since": since, "until": until, "limit": limit})
    return {row.run_id: EffectVerdict(row.verdict) for row in rows}
