"""The run store's writer when something fails that is no failure of the database."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from trainmedic_server.adapters.sql_store.writer import Committer, UnitOfWork
from trainmedic_server.errors import StoreUnavailable


@pytest.mark.parametrize(
    ("error", "event", "has_trace"),
    [
        (KeyError("a bug"), "run store failed unexpectedly", True),
        (StoreUnavailable("another server leads"), "run store failed", False),
        (OSError("the disk fails"), "run store failed", False),
    ],
)
def test_a_bug_is_logged_with_its_place(error: Exception, event: str, has_trace: bool) -> None:
    """Callers hear that the store could not commit, the log says that it is no outage."""

    def fail() -> None:
        raise error

    committer = Committer(sa.create_engine("sqlite://"), require=fail)
    loop: Any = asyncio.new_event_loop()
    unit = UnitOfWork(lambda _: None, loop.create_future(), loop)
    with capture_logs() as logged:
        committer.commit([unit])
    loop.close()
    assert [(each["event"], each.get("exc_info", False)) for each in logged] == [(event, has_trace)]
    assert isinstance(unit.error, StoreUnavailable)
    assert unit.error.__cause__ is error
