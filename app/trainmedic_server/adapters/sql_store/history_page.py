"""Select of one page of the history.

Several values of a filter need one short list each: an index has the page order only for a single value.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from trainmedic.wire.ids import first_id
from trainmedic_server.adapters.sql_store.columns import encode_json
from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of
from trainmedic_server.adapters.sql_store.schema import (
    TimeColumn,
    is_closed,
    is_named,
    is_no_member,
    is_open,
    orders,
    runs,
    touched_nodes,
)
from trainmedic_server.ports.store import HistoryFilter, values_of

_MOST_LISTS = 32  # More combinations of values are one condition instead.
_COLUMNS = {name: runs.c[name] for name in ("playbook", "status", "decision")}

_CLOCK_MARGIN_MS = 86_400_000  # A day: most difference between `created_at` and the time in the run's ID.

Condition = sa.ColumnElement[bool]
Span = tuple[datetime, datetime]


def renamed_alerts(connection: sa.Connection, matching: HistoryFilter) -> Collection[str]:
    """Return the filter's alert names that an alert map has renamed in a run. Others need no second condition."""
    names = values_of(matching.alertname)
    if not names:
        return ()
    column = runs.c.original_alert_name
    return [name for name in names if connection.execute(sa.select(1).where(column == name).limit(1)).scalar()]


def page_select(
    matching: HistoryFilter,
    limit: int,
    before: tuple[datetime, str] | None = None,
    renamed_names: Collection[str] = (),
) -> sa.Select[Any]:
    common = list(other_conditions(matching, before))
    groups = list(alternatives(matching, renamed_names=renamed_names))
    lists = list(itertools.islice(itertools.product(*groups), _MOST_LISTS + 1))
    page = sa.select(runs).order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(limit)
    if len(lists) == 1:
        return page.where(*common, *lists[0])
    if len(lists) > _MOST_LISTS:
        return page.where(*common, *(sa.or_(*each) for each in groups))
    parts = [_ids(sa.and_(*common, *each), limit) for each in lists]
    return page.where(runs.c.id.in_(sa.union_all(*parts)))


def _ids(condition: Condition, limit: int) -> sa.Select[Any]:
    newest = sa.select(runs.c.id).where(condition).order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(limit)
    return sa.select(newest.subquery().c.id)


def alternatives(
    matching: HistoryFilter, span: Span | None = None, renamed_names: Collection[str] = ()
) -> Iterator[Sequence[Condition]]:
    """Yield the alternatives of each filter. With `span`, they may exclude runs created outside it.

    `renamed_names`: see `renamed_alerts`.
    """
    for name, column in _COLUMNS.items():
        if values := values_of(getattr(matching, name)):
            yield [column == value for value in values]
    if values := values_of(matching.job):
        yield [condition for value in values for condition in _of_job(value)]
    if values := values_of(matching.alertname):
        originals = [runs.c.original_alert_name == value for value in renamed_names]
        yield [*(runs.c.alert_name == value for value in values), *originals]
    if values := values_of(matching.gpu):
        yield [_of_gpu(value) for value in values]
    if values := values_of(matching.target):
        yield [_of_target(value) for value in values]
    if values := values_of(matching.node):
        yield [condition for value in values for condition in _of_node(value, span)]
    if values := values_of(matching.by):
        yield [_has_id_in(orders.c.run_id, span, orders.c.actor == value) for value in values]


def _of_gpu(text: str) -> Condition:
    """Accept ``gpu:node-1/0`` or ``node-1/0``, or a GPU alone, such as ``0`` or a UUID, on any node."""
    node, slash, gpu = text.removeprefix("gpu:").partition("/")
    return sa.and_(runs.c.node == node, runs.c.gpu == gpu) if slash else runs.c.gpu == text


def _of_job(name: str) -> tuple[Condition, Condition]:
    """Return the conditions that the job is the run's target, or one of its further ones."""
    keys = sa.type_coerce(runs.c.also, sa.Text)  # A JSON list, in which a key stands in quotes.
    is_among = sa.func.replace(keys, encode_json(f"job:{name}"), "") != keys
    return runs.c.job == name, sa.and_(runs.c.also.is_not(None), is_among)


def _of_target(key: str) -> Condition:
    kind, _, name = key.partition(":")
    same = runs.c.target_key == key
    match kind:
        case "gpu":
            return sa.and_(same, _of_gpu(key))
        case "node":
            return sa.and_(same, runs.c.node == name)
        case "job":
            return sa.and_(same, runs.c.job == name)
        case _:
            return same


def _of_node(name: str, span: Span | None) -> tuple[Condition, Condition]:
    # A run belongs to its target's node. Only one without such a node, as on a job, belongs to those that it touched.
    touching = _has_id_in(touched_nodes.c.run_id, span, touched_nodes.c.node == name, is_named)
    return runs.c.node == name, sa.and_(touching, runs.c.node.is_(None))


def _has_id_in(ids: sa.Column[Any], span: Span | None, *conditions: Condition | sa.TextClause) -> Condition:
    # Run IDs begin with the time of creation.
    chosen = sa.select(ids).where(*conditions)
    if span is not None:
        first, last = (microseconds_of(moment) // 1000 for moment in span)
        chosen = chosen.where(ids >= first_id(first - _CLOCK_MARGIN_MS), ids < first_id(last + _CLOCK_MARGIN_MS))
    return runs.c.id.in_(chosen)


def other_conditions(
    matching: HistoryFilter, before: tuple[datetime, str] | None
) -> Iterator[Condition | sa.TextClause]:
    if matching.since is not None:
        yield runs.c.created_at >= matching.since
    if matching.until is not None:
        yield runs.c.created_at < matching.until
    if matching.is_open is not None:
        # Only open runs have no end. A condition on their status would not use the index of unfinished runs.
        yield from (runs.c.unfinished, runs.c.ended_at.is_(None)) if matching.is_open else (is_closed,)
    if matching.parent is not None:
        yield runs.c.parent.in_(values_of(matching.parent))
    elif not matching.finds_members:
        yield is_no_member
    if matching.owes_undo is True:
        yield from (runs.c.unfinished, is_closed)
    elif matching.owes_undo is False:
        yield sa.or_(sa.not_(runs.c.unfinished), is_open)
    if matching.has_acted:
        yield runs.c.acted_at.is_not(None)
    yield from after_place(before)


def after_place(before: tuple[datetime, str] | None) -> Iterator[Condition]:
    if before is not None:
        created_at, run_id = before
        last = sa.tuple_(sa.literal(created_at, TimeColumn), sa.literal(run_id))
        yield sa.tuple_(runs.c.created_at, runs.c.id) < last
