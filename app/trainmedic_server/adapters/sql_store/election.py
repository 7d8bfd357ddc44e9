"""Election of the leader by a PostgreSQL lock."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.sql_store import database, postgresql, revision

ASK_EVERY = 0.5  # Seconds between two tries to take the lock.

_WON = "it is about to take over"  # Beginning of `Election.why` once the lock is taken.

log = telemetry.logger(__name__)


class Election:
    def __init__(self, url: str, takeover: timedelta = postgresql.TAKEOVER, address: str = "") -> None:
        postgresql.conninfo(url)
        self._url = url
        self._takeover = takeover
        self._address = address
        self._session: postgresql.LockSession | None = None
        self.why = "it has just started"  # Why this server is not the leader yet, for its answers as a standby.
        self.holder = ""  # Address of the leader, empty if unknown.

    async def win(self) -> postgresql.LockSession:
        """Return the session with the lock. Wait while another server has it or PostgreSQL does not answer. Raises
        ConfigurationError if waiting is useless.
        """
        try:
            while True:
                try:
                    if await self._try():
                        assert self._session is not None
                        self._report(await asyncio.to_thread(_takeover_reason, self._session))
                        session, self._session = self._session, None
                        return session
                    self._report("another server works")
                except errors.StoreUnavailable as error:
                    await self._close_session()
                    self._report("PostgreSQL does not answer", str(error))
                await asyncio.sleep(ASK_EVERY)
        finally:
            await self._close_session()

    async def _try(self) -> bool:
        if self._session is None:
            self._session = await asyncio.to_thread(
                postgresql.LockSession.open, self._url, self._takeover, self._address
            )
            await asyncio.to_thread(_require_not_older, self._session)
        if await asyncio.to_thread(self._session.take_lock):
            self.holder = ""
            return True
        self.holder = await asyncio.to_thread(self._session.holder)
        return False

    async def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await asyncio.to_thread(session.close)

    def _report(self, reason: str, error: str | None = None) -> None:
        if reason != self.why:
            self.why = reason
            if error is None:
                log.info("takes over" if reason.startswith(_WON) else "stands by", why=reason)
            else:
                log.warning("stands by", why=reason, error=error)
        if error is not None:
            self.holder = ""


def _require_not_older(session: postgresql.LockSession) -> None:
    with database.translated("PostgreSQL does not answer"), session.engine.begin() as connection:
        revision.require_not_older(connection)


def _takeover_reason(session: postgresql.LockSession) -> str:
    with database.translated("PostgreSQL does not answer"), session.engine.begin() as connection:
        postgresql.allow_long_statements(connection)
        runs = revision.runs_to_migrate(connection)
    return _WON if runs is None else f"{_WON}, and brings the schema of {runs:,} runs up to date"
