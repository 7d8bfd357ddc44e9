"""Outcomes of each playbook's runs: whole days from ``playbook_days``, parts of days from the runs.

Manual undos are always counted from the runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import run_facts
from trainmedic_server.adapters.sql_store.effects import effects
from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of, time_of
from trainmedic_server.adapters.sql_store.schema import (
    TimeColumn,
    identity,
    is_no_member,
    is_undo,
    orders,
    playbook_days,
    runs,
    steps,
)
from trainmedic_server.domain.effect import EffectVerdict
from trainmedic_server.domain.run import Status, StepStatus
from trainmedic_server.ports.tallies import PlaybookTally

_SECOND = 1_000_000
_SINCE, _UNTIL = sa.bindparam("since", type_=TimeColumn), sa.bindparam("until", type_=TimeColumn)
_IN_TIME = sa.and_(runs.c.created_at >= _SINCE, runs.c.created_at < _UNTIL)


def _microseconds(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return sa.type_coerce(column, sa.BigInteger)


_earlier = runs.alias("earlier")
# Constants, so that the partial indexes of started runs can be used.
_WAS_STARTED, _EARLIER_WAS_STARTED = (
    sa.text(f"{table}.status <> '{Status.NOT_STARTED.value}'") for table in (runs.name, _earlier.name)
)
_REPEATED = sa.exists().where(
    _earlier.c.playbook == runs.c.playbook,
    _earlier.c.target_key == runs.c.target_key,
    _microseconds(_earlier.c.ended_at) <= _microseconds(runs.c.created_at),
    _microseconds(_earlier.c.ended_at)
    >= _microseconds(runs.c.created_at) - int(run_facts.REPEATED_WITHIN.total_seconds()) * _SECOND,
    _EARLIER_WAS_STARTED,
    _earlier.c.status != Status.OBSERVED.value,
)
# One playbook at a time, because the covering indexes begin with it.
_OF_PLAYBOOK = runs.c.playbook == sa.bindparam("playbook")
_NEXT_PLAYBOOK = sa.select(sa.func.min(runs.c.playbook)).where(is_no_member, runs.c.playbook > sa.bindparam("after"))
_HELD_BACK = sa.select(sa.func.count()).where(
    _OF_PLAYBOOK, is_no_member, runs.c.status == Status.NOT_STARTED.value, _IN_TIME
)
# Counted by the database: fetching a row for each of a million runs costs more.
_STARTED = (
    sa.select(
        runs.c.status,
        sa.func.count().label("runs"),
        sa.func.count().filter(_REPEATED).label("repeated"),
    )
    .where(_OF_PLAYBOOK, is_no_member, _WAS_STARTED, _IN_TIME)
    .group_by(runs.c.status)
)
# All playbooks at once: for one of them, the index on the status would read all successful runs.
_REPAIRS = sa.select(
    runs.c.playbook, (_microseconds(runs.c.ended_at) - _microseconds(runs.c.created_at)).label("lasted")
).where(_IN_TIME, is_no_member, runs.c.status == Status.SUCCEEDED.value, runs.c.ended_at.is_not(None))
_BEGAN, _ENDED = _microseconds(steps.c.started_at).label("began"), _microseconds(steps.c.ended_at).label("ended")
_HAS_TIMED_OUT = steps.c.status == StepStatus.TIMED_OUT.value
_WAS_ANSWERED = sa.and_(
    steps.c.kind == "approve",
    steps.c.status.in_([StepStatus.SUCCEEDED.value, StepStatus.REJECTED.value]),
    steps.c.started_at.is_not(None),
    steps.c.ended_at.is_not(None),
    sa.or_(steps.c.deadline.is_(None), steps.c.ended_at < steps.c.deadline),  # else `on_timeout` may have decided
)
_TIMED_OUT_OR_ANSWERED_STEPS = (
    sa.select(runs.c.id, runs.c.status, _HAS_TIMED_OUT.label("timed_out"), _BEGAN, _ENDED)
    .join(steps, steps.c.run_id == runs.c.id)
    .where(_OF_PLAYBOOK, is_no_member, _WAS_STARTED, _IN_TIME, sa.or_(_HAS_TIMED_OUT, _WAS_ANSWERED))
)
_EFFECTS = (
    sa.select(effects.c.playbook, effects.c.verdict, sa.func.count().label("runs"))
    .where(effects.c.acted_at >= _SINCE, effects.c.acted_at < _UNTIL)
    .group_by(effects.c.playbook, effects.c.verdict)
)
_UNDONE = (  # starts with the few orders, not with the runs
    sa.select(runs.c.playbook, sa.func.count().label("runs"))
    .where(
        runs.c.id.in_(sa.select(orders.c.run_id).where(is_undo)), _WAS_STARTED, runs.c.status != Status.OBSERVED.value
    )
    .where(_IN_TIME)
    .group_by(runs.c.playbook)
)
_COUNTED_FROM = sa.select(identity.c.counted_from)
_NEWEST = sa.select(_microseconds(sa.func.max(runs.c.created_at)))
_SUM = sa.cast(sa.func.sum(playbook_days.c.count), sa.BigInteger)  # PostgreSQL returns a decimal.
_OF_DAYS = (
    sa.select(playbook_days.c.playbook, playbook_days.c.fact, _SUM.label("runs"))
    .where(playbook_days.c.day >= sa.bindparam("first"), playbook_days.c.day < sa.bindparam("end"))
    .where(playbook_days.c.count > 0)  # Negative if a run outlived the counts of its day.
    .group_by(playbook_days.c.playbook, playbook_days.c.fact)
)
_VERDICTS = (
    sa.select(effects.c.run_id, effects.c.verdict)
    .where(effects.c.acted_at >= _SINCE, effects.c.acted_at < _UNTIL)
    .order_by(effects.c.acted_at.desc())
    .limit(sa.bindparam("limit"))
)


def tally(connection: sa.Connection, since: datetime, until: datetime) -> dict[str, PlaybookTally]:
    first, end = _whole_days(connection, since, until)
    tallies: dict[str, PlaybookTally] = defaultdict(PlaybookTally)
    if first < end:
        _add_days(connection, tallies, first, end)
        _count_runs(connection, tallies, since, time_of(first * run_facts.MICROSECONDS_OF_A_DAY))
        _count_runs(connection, tallies, time_of(end * run_facts.MICROSECONDS_OF_A_DAY), until)
    else:
        _count_runs(connection, tallies, since, until)
    for row in connection.execute(_UNDONE, {"since": since, "until": until}):
        tallies[row.playbook].undone_by_hand += row.runs
    return dict(tallies)


def _whole_days(connection: sa.Connection, since: datetime, until: datetime) -> tuple[int, int]:
    """Return the first and the end (excluded) of the days in ``playbook_days`` within the period."""
    day = run_facts.MICROSECONDS_OF_A_DAY
    since_us, until_us = microseconds_of(since), microseconds_of(until)
    first = max(math.ceil(since_us / day), connection.execute(_COUNTED_FROM).scalar() or 0)
    newest = connection.execute(_NEWEST).scalar()
    if newest is None or newest >= until_us:
        return first, until_us // day
    return first, math.ceil(until_us / day)  # No later run: the last day counts as a whole.


def _add_days(connection: sa.Connection, tallies: dict[str, PlaybookTally], first: int, end: int) -> None:
    for playbook, fact, count in connection.execute(_OF_DAYS, {"first": first, "end": end}):
        name, _, value = fact.partition(":")
        tally = tallies[playbook]
        if name == run_facts.STATUS:
            tally.statuses[Status(value)] += count
        elif name == run_facts.EFFECT:
            tally.effects[EffectVerdict(value)] += count
        elif name == run_facts.REPAIR_SECONDS:
            tally.repair_seconds[float(value)] += count
        elif name == run_facts.PERSON_SECONDS:
            tally.person_seconds[float(value)] += count
        elif name == run_facts.TIMED_OUT:
            tally.timed_out += count
        elif name == run_facts.REPEATED:
            tally.repeated += count


def _count_runs(connection: sa.Connection, tallies: dict[str, PlaybookTally], since: datetime, until: datetime) -> None:
    if since >= until:
        return
    time = {"since": since, "until": until}
    for playbook in _playbooks_with_runs(connection):
        of_playbook = _tally_of_playbook(connection, {**time, "playbook": playbook})
        if of_playbook.statuses:
            tallies[playbook].add(of_playbook)
    for row in connection.execute(_REPAIRS, time):
        tallies[row.playbook].repair_seconds[run_facts.rounded(row.lasted / _SECOND)] += 1
    for row in connection.execute(_EFFECTS, time):
        tallies[row.playbook].effects[EffectVerdict(row.verdict)] += row.runs


def _playbooks_with_runs(connection: sa.Connection) -> Iterator[str]:
    playbook: str | None = ""
    while (playbook := connection.execute(_NEXT_PLAYBOOK, {"after": playbook}).scalar()) is not None:
        yield playbook


def _tally_of_playbook(connection: sa.Connection, which: Mapping[str, Any]) -> PlaybookTally:
    tally = PlaybookTally()
    if held_back := connection.execute(_HELD_BACK, which).scalar_one():
        tally.statuses[Status.NOT_STARTED] = held_back
    for row in connection.execute(_STARTED, which):
        status = Status(row.status)
        tally.statuses[status] += row.runs
        if status is not Status.OBSERVED:
            tally.repeated += row.repeated
    found = connection.execute(_TIMED_OUT_OR_ANSWERED_STEPS, which).all() if tally.statuses else []
    of_closed_runs = [row for row in found if not Status(row.status).is_open]
    timed_out = {row.id for row in of_closed_runs if row.timed_out and row.status != Status.OBSERVED.value}
    tally.timed_out = len(timed_out)
    tally.person_seconds.update(
        run_facts.rounded((row.ended - row.began) / _SECOND) for row in of_closed_runs if not row.timed_out
    )
    return tally


def effect_verdicts(
    connection: sa.Connection, since: datetime, until: datetime, limit: int
) -> dict[str, EffectVerdict]:
    rows = connection.execute(_VERDICTS, {"since": since, "until": until, "limit": limit})
    return {row.run_id: EffectVerdict(row.verdict) for row in rows}
