"""Time limit and cancellation of one read of the history.

After a cancellation the connection is closed: PostgreSQL may receive the request late, and end a later read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import database

log = logging.getLogger(__name__)

SECONDS = 30.0  # Limit of a read. A page of the longest history took 0.5 s, a report of a year 3 s.
_CANCEL_SECONDS = 5.0
_STEPS_BETWEEN_CHECKS = 20_000  # Of SQLite's virtual machine.
_CANCELLED = "57014"  # SQLSTATE query_canceled: by time limit or cancel request.


class BoundedRead:
    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = clock() + seconds
        self._seconds = seconds
        self._lock = threading.Lock()
        self._driver: Any = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the read. Block until PostgreSQL has the request, for 5 s at most. Safe in any thread."""
        with self._lock:
            self._is_cancelled = True
            if self._driver is not None and hasattr(self._driver, "cancel_safe"):
                try:
                    self._driver.cancel_safe(timeout=_CANCEL_SECONDS)
                except self._driver.Error as error:  # The database is unavailable; the read ends by its time limit.
                    log.info("cannot cancel a read of the history", extra={"reason": type(error).__name__})

    @contextmanager
    def bounded(self, connection: sa.Connection) -> Iterator[None]:
        """Raises StoreSlow after the time limit or a cancellation, StoreUnavailable for other faults, and if cancelled
        before it begins.
        """
        driver = connection.connection.driver_connection
        is_sqlite = connection.dialect.name == "sqlite"
        with self._lock:
            if self._is_cancelled:  # while it waited for its connection
                raise errors.StoreUnavailable("the caller of this read of the history has left")
            self._driver = driver
        if is_sqlite:
            driver.set_progress_handler(self._must_end, _STEPS_BETWEEN_CHECKS)  # type: ignore[union-attr]
        try:
            yield
        except exc.SQLAlchemyError as error:
            if self._must_end() or getattr(getattr(error, "orig", None), "sqlstate", None) == _CANCELLED:
                raise errors.StoreSlow(
                    f"reading the history took longer than {self._seconds:.0f} s and was ended"
                ) from error
            raise database.unavailable("the history could not be read", error) from error
        finally:
            if is_sqlite:
                driver.set_progress_handler(None, 0)  # type: ignore[union-attr]
            with self._lock:
                self._driver = None
            if self._is_cancelled and not is_sqlite:
                connection.invalidate()

    def _must_end(self) -> bool:
        return self._is_cancelled or self._clock() > self._deadline
