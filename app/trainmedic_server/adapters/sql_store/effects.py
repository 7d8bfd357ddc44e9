"""Measured effects of runs. Saved verdicts are also counted by day of the act and playbook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from msgspec.structs import asdict

from trainmedic_server.adapters.sql_store import run_facts
from trainmedic_server.adapters.sql_store.bulk import UnitRecords
from trainmedic_server.adapters.sql_store.columns import JsonColumn, Text, TimeColumn, metadata, partial_index
from trainmedic_server.adapters.sql_store.lookup import KEYS, Lookup
from trainmedic_server.adapters.sql_store.schema import playbook_days
from trainmedic_server.domain.effect import Effect, EffectVerdict
from trainmedic_server.ports.effects import EffectRecords, EventPositions

effects = sa.Table(
    "effects",
    metadata,
    sa.Column("run_id", Text, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("playbook", Text, nullable=False),
    sa.Column("acted_at", TimeColumn, nullable=False),
    sa.Column("due_at", TimeColumn),
    sa.Column("verdict", Text, nullable=False),
    sa.Column("plain", JsonColumn, nullable=False),  # the other members of `Effect`
)

event_positions = sa.Table(
    "event_positions",
    metadata,
    sa.Column("listener", Text, primary_key=True),
    sa.Column("position", sa.BigInteger, nullable=False),  # last event taken; for an archive, its last file
)

partial_index("ix_effects_due", effects.c.due_at, where="due_at IS NOT NULL")
# outcomes of each playbook's runs in a period
sa.Index("ix_effects_acted", effects.c.acted_at, effects.c.playbook, effects.c.verdict)

_COLUMNS = ("run_id", "playbook", "acted_at", "due_at", "verdict")
_OF_RUNS = Lookup(sa.select(effects).where(effects.c.run_id.in_(KEYS)))


def of_run(run_id: str) -> sa.Select[Any]:
    return sa.select(effects).where(effects.c.run_id == run_id)


def effect_of(row: Any) -> Effect:
    run_id, playbook, acted_at, due_at, verdict, plain = row
    series = tuple((at, value) for at, value in plain.pop("series", ()))
    return Effect(run_id, playbook, acted_at, due_at, EffectVerdict(verdict), series=series, **plain)


def _row_of(effect: Effect) -> tuple[Any, ...]:
    members = asdict(effect)
    columns = [members.pop(name) for name in _COLUMNS]
    return (*columns, {name: value for name, value in members.items() if value not in (None, ())})


def _fact_of(effect: Effect) -> run_facts.Key:
    return run_facts.day_of(effect.acted_at), effect.playbook, f"{run_facts.EFFECT}:{effect.verdict.value}"


class SqlEffects(UnitRecords, EffectRecords, EventPositions):
    def of_runs(self, run_ids: Collection[str]) -> dict[str, Effect]:
        return {row[0]: effect_of(row) for row in _OF_RUNS.rows(self._connection(), run_ids)}

    def due(self, moment: datetime, limit: int) -> list[Effect]:
        statement = sa.select(effects).where(effects.c.due_at.is_not(None), effects.c.due_at <= moment)
        rows = self._connection().execute(statement.order_by(effects.c.due_at, effects.c.run_id).limit(limit))
        return [effect_of(row) for row in rows]

    def save(self, made: Sequence[Effect]) -> None:
        if not made:
            return
        before = self.of_runs([effect.run_id for effect in made])
        counts: run_facts.Counts = Counter(map(_fact_of, made))
        counts.subtract(map(_fact_of, before.values()))
        self._write(effects, [*map(_row_of, made)])
        self._write(playbook_days, [(*key, count) for key, count in counts.items() if count], "add")

    def position(self, listener: str) -> int | None:
        statement = sa.select(event_positions.c.position).where(event_positions.c.listener == listener)
        position: int | None = self._connection().execute(statement).scalar()
        return position

    def save_position(self, listener: str, seq: int) -> None:
        self._write(event_positions, [(listener, seq)])
