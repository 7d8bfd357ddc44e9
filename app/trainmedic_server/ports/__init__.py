"""What the engine needs of the outside, as interfaces. Adapters implement them; wiring hands them in.

A port says what holds, not how. Each has one contract suite in ``tests/contract`` which every
implementation passes, the fakes included.

The node agent uses ports too, and its process must stay small: models are imported here for type
checkers only (pydantic alone would be a fifth of the agent), and the engine's ports when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmedic_server.ports.actions import (
        Action,
        Actions,
        Call,
        Hold,
        Inverse,
        Leased,
        Placed,
        Renewal,
        Services,
        TemplateChecked,
        Word,
    )
    from trainmedic_server.ports.cluster import Cluster
    from trainmedic_server.ports.limits import Limits
    from trainmedic_server.ports.outside import (
        AlertSource,
        Clock,
        CommandBus,
        HttpCaller,
        HttpReply,
        Notifier,
        Pods,
        Presence,
    )
    from trainmedic_server.ports.playbooks import Book, Catalog, Match, Scope, Step
    from trainmedic_server.ports.store import (
        GuardFacts,
        History,
        HistoryFilter,
        LinkedRun,
        RunRecord,
        RunStore,
        Transaction,
    )

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
    "Pods",
    "Presence",
    "Renewal",
    "RunRecord",
    "RunStore",
    "Scope",
    "Services",
    "Step",
    "TemplateChecked",
    "Transaction",
    "Word",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A name of `__all__` that has not been asked for yet."""
        if name in __all__:
            for module in ("actions", "cluster", "limits", "outside", "playbooks", "store"):
                found = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
                if found is not None:
                    globals()[name] = found
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
