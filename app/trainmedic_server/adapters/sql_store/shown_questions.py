"""Stored chat messages of questions."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store.bulk import UnitRecords
from trainmedic_server.adapters.sql_store.columns import Text, metadata
from trainmedic_server.ports.chat import ShownQuestion, ShownQuestions

shown_questions = sa.Table(
    "shown_questions",
    metadata,
    sa.Column("run_id", Text, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("step", Text, primary_key=True),
    sa.Column("channel", Text, nullable=False),
    sa.Column("message", Text, nullable=False),
    sa.Column("shown", Text, nullable=False),
)


class SqlShownQuestions(UnitRecords, ShownQuestions):
    def of_runs(self, run_ids: Collection[str]) -> list[ShownQuestion]:
        chosen = sa.select(shown_questions).where(shown_questions.c.run_id.in_(run_ids))
        return [ShownQuestion(*row) for row in self._connection().execute(chosen)]

    def save(self, shown: ShownQuestion) -> None:
        self._write(shown_questions, [(shown.run_id, shown.step, shown.channel, shown.message, shown.shown)])
