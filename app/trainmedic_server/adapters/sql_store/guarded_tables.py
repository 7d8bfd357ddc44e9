"""The tables that a unit of work writes at once, each behind an object of its own; a part of ``transaction``."""

from __future__ import annotations

from abc import ABC, abstractmethod

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store.effects import SqlEffects
from trainmedic_server.adapters.sql_store.findings import SqlFindings
from trainmedic_server.adapters.sql_store.messages import SqlMessages
from trainmedic_server.adapters.sql_store.present import SqlAgentLives
from trainmedic_server.adapters.sql_store.sessions import SqlSessions
from trainmedic_server.adapters.sql_store.shown_questions import SqlShownQuestions
from trainmedic_server.adapters.sql_store.verdicts import SqlVerdicts


class GuardedTables(ABC):
    """Nothing waits to be written to them, and nothing of them is remembered."""

    @abstractmethod
    def _guarded_connection(self) -> sa.Connection:
        """The unit's connection, behind its savepoint."""

    @property
    def findings(self) -> SqlFindings:
        return SqlFindings(self._guarded_connection)

    @property
    def agents(self) -> SqlAgentLives:
        return SqlAgentLives(self._guarded_connection)

    @property
    def verdicts(self) -> SqlVerdicts:
        return SqlVerdicts(self._guarded_connection)

    @property
    def effects(self) -> SqlEffects:
        return SqlEffects(self._guarded_connection)

    @property
    def event_positions(self) -> SqlEffects:
        return SqlEffects(self._guarded_connection)

    @property
    def messages(self) -> SqlMessages:
        return SqlMessages(self._guarded_connection)

    @property
    def sessions(self) -> SqlSessions:
        return SqlSessions(self._guarded_connection)

    @property
    def shown_questions(self) -> SqlShownQuestions:
        return SqlShownQuestions(self._guarded_connection)
