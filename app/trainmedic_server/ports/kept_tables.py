"""What a unit of work of the run store sees beside runs, alerts and events; a part of ``store``."""

from __future__ import annotations

from typing import Protocol

from trainmedic_server.ports.chat import ShownQuestions
from trainmedic_server.ports.effects import EffectRecords, EventPositions
from trainmedic_server.ports.findings import FindingRecords
from trainmedic_server.ports.messages import StoredMessages
from trainmedic_server.ports.present import StoredAgentLives
from trainmedic_server.ports.sessions import StoredSessions
from trainmedic_server.ports.verdicts import StoredVerdicts


class KeptTables(Protocol):
    """Each kind of record with an interface of its own."""

    @property
    def findings(self) -> FindingRecords:
        """What rules have found in logs."""
        ...

    @property
    def agents(self) -> StoredAgentLives:
        """When agents were heard of last."""
        ...

    @property
    def verdicts(self) -> StoredVerdicts:
        """What was said of the failures of jobs."""
        ...

    @property
    def effects(self) -> EffectRecords:
        """What became of the metrics of alerts after runs had acted."""
        ...

    @property
    def event_positions(self) -> EventPositions:
        """Up to which event each listener has taken them."""
        ...

    @property
    def messages(self) -> StoredMessages:
        """What people are to be told, and were told."""
        ...

    @property
    def shown_questions(self) -> ShownQuestions:
        """The messages of a chat that show what runs ask."""
        ...

    @property
    def sessions(self) -> StoredSessions:
        """The browsers that are signed in to the console."""
        ...
