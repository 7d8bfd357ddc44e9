"""Run stores that a test opens in its own process.

A server on PostgreSQL begins anew when its session is not confirmed for some seconds: its process is replaced, or
ends. In a test that process is pytest itself, and one long unit of work on a busy machine is enough. So a store is
opened here with a session that lasts, and its loss is reported to the test. Used by the contract and integration tests.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from trainmedic_server.adapters.sql_store.postgresql import LockSession, is_postgresql
from trainmedic_server.adapters.sql_store.store import SqlStore

LASTING = timedelta(minutes=10)
"""Takeover time that no unit of work of a test reaches, however busy the machine is."""


def leave_the_process_alone(reason: str) -> None:
    """Do nothing. The store raises StoreUnavailable with the reason at its next use."""


def open_store(
    url: str, takeover: timedelta = LASTING, on_lost: Callable[[str], object] = leave_the_process_alone
) -> SqlStore:
    """Return the store at `url`, with its schema brought up to date. Blocks. Raises as `SqlStore.open`.

    On PostgreSQL, `on_lost` is called with the reason, on some thread, when the session is lost.
    """
    if not is_postgresql(url):
        return SqlStore.open(url)
    session = LockSession.open(url, takeover)
    assert session.take_lock()
    return SqlStore.of_session(session, on_lost=on_lost)
