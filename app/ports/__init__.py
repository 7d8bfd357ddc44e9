"""What the engine needs of the outside, as interfaces. Adapters implement them; wiring hands them in.

A port says what holds, not how. Each has one contract suite in ``tests/contract`` which every
implementation passes, the fakes included.

The node agent uses ports too, and its process must stay small: models are imported here for type
checkers only (pydantic alone would be a fifth of the agent).
"""

from __future__ import annotations

from app.ports.actions import Action, Actions, Call, Hold, Inverse, Leased, Placed, Renewal, Services, TemplateChecked
from app.ports.cluster import Cluster
from app.ports.limits import Limits
from app.ports.outside import AlertSource, Clock, CommandBus, HttpCaller, HttpReply, Notifier, Presence
from app.ports.playbooks import Book, Catalog, Match, Scope, Step
from app.ports.store import GuardFacts, History, HistoryFilter, LinkedRun, RunRecord, RunStore, Transaction

__all__ = [
    "Action",
    "Actions",
    "AlertSource",
    "Book",
    "Call",
    "Catalog",
    "Clock",
    "Cluster",
    "CommandBus",
    "GuardFacts",
    "History",
    "HistoryFilter",
    "Hold",
    "HttpCaller",
    "HttpReply",
    "Inverse",
    "Leased",
    "Limits",
    "LinkedRun",
    "Match",
    "Notifier",
    "Placed",
    "Presence",
    "Renewal",
    "RunRecord",
    "RunStore",
    "Scope",
    "Services",
    "Step",
    "TemplateChecked",
    "Transaction",
]
