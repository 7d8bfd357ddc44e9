"""Session with PostgreSQL, and the lock of the leader.

The lock belongs to the writing session, which is never reopened: a server whose session has ended cannot write.
PostgreSQL ends silent sessions, so a hanging server does not block the others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import pool

from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.sql_store import database, reading
from trainmedic_server.adapters.sql_store.columns import metadata
from trainmedic_server.adapters.sql_store.leadership import Leadership, now

if TYPE_CHECKING:
    import psycopg

log = telemetry.logger(__name__)

TAKEOVER = timedelta(seconds=8)  # Time until PostgreSQL ends a silent session.
OLDEST = 14  # First version that ends silent sessions.

_CONNECT_SECONDS = 5
_NAME_BYTES = 63  # PostgreSQL's limit
_NAME_PREFIX = "trainmedic@"
_SCHEME = re.compile(r"(postgresql|postgres)(\+\w+)?:")
# A login or database that is missing or forbidden, or an option of the URL with a wrong value: retrying is useless.
_PERMANENT_FAILURE = re.compile(
    r"password authentication failed|no password supplied|no pg_hba.conf entry|does not exist"
    r"|invalid \"?\w+\"? value|bad value for|invalid value for parameter|unrecognized configuration parameter"
)
# Acknowledged data must survive a crash of PostgreSQL, whatever the database's default. Stricter values stay.
_REQUIRE_DURABILITY = (
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
)
HAS_LOCK = "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()"
"""False if a connection pooler has switched the session."""

# Tables with rows and without statistics.
_UNKNOWN_TABLES = """
    SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relname = ANY(%s)
    AND reltuples < 0 AND pg_relation_size(oid) > 0
"""
# `objsubid` 1 marks a lock with one 64-bit key, which is in two columns.
_HOLDER = """
    SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND database = (
        SELECT oid FROM pg_database WHERE datname = current_database()
    ) AND ((classid::bigint << 32) | objid::bigint) = %s
"""


def is_postgresql(url: str) -> bool:
    return _SCHEME.match(url) is not None


def conninfo(url: str) -> str:
    """Raises ConfigurationError."""
    try:
        import psycopg.conninfo
    except ImportError:
        raise errors.ConfigurationError(
            "the database URL names PostgreSQL, which needs the extra postgresql of trainmedic-server "
            "(docs/how-to/install.md#extras)"
        ) from None
    scheme, rest = url.split(":", 1)
    if scheme not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise errors.ConfigurationError(f"the database URL begins with {scheme}://; write postgresql://")
    try:
        ports = psycopg.conninfo.conninfo_to_dict(f"postgresql:{rest}").get("port") or ""
        if not all(port.isdigit() and 0 < int(port) <= 65535 for port in str(ports).split(",") if port):
            raise ValueError
    except (psycopg.ProgrammingError, ValueError):  # Its text shows parts of the URL, possibly the password.
        raise errors.ConfigurationError(
            "the database URL cannot be read; it looks like postgresql://user:password@host:5432/database, "
            "with %XX for special characters in the password"
        ) from None
    return f"postgresql:{rest}"


class LockSession:
    def __init__(self, connection: psycopg.Connection[Any], url: str, takeover: timedelta) -> None:
        self._connection = connection
        self.url = url
        self.takeover = takeover
        self._key = _key_of(connection)
        unused = [connection]

        def reuse_connection() -> Any:
            # SQLAlchemy calls again only if the connection has ended. A new session would not have the lock.
            if unused:
                return unused.pop()
            raise errors.StoreUnavailable("the session with PostgreSQL is over")

        self.engine = _engine(reuse_connection, poolclass=pool.StaticPool)

    @classmethod
    def open(cls, url: str, takeover: timedelta = TAKEOVER, address: str = "") -> LockSession:
        """Other servers reach this one at `address`, empty if at none. Raises StoreUnavailable if PostgreSQL does not
        answer, ConfigurationError for an unusable URL, login, version or search path.
        """
        seconds = takeover.total_seconds()
        connection = _connect(
            url,
            {
                "idle_session_timeout": seconds,
                "idle_in_transaction_session_timeout": seconds,
                "statement_timeout": seconds / 2,  # ends before `Leadership` gives up, after two thirds
                "lock_timeout": seconds / 6,
                "tcp_user_timeout": seconds,
            },
            application_name=_session_name(address),
            target_session_attrs="read-write",
        )
        try:
            return cls(connection, url, takeover)
        except BaseException:
            connection.close()
            raise

    def take_lock(self) -> bool:
        return bool(self._ask("SELECT pg_try_advisory_lock(%s)", self._key))

    def holder(self) -> str:
        """Return the leader's address, empty if unknown."""
        name = str(self._ask(_HOLDER, self._key) or "")
        return name.removeprefix(_NAME_PREFIX) if name.startswith(_NAME_PREFIX) else ""

    def begin_leadership(self, on_lost: Callable[[str], object]) -> Leadership:
        asked_at = now()
        if not self._ask(HAS_LOCK):
            raise errors.StoreUnavailable("the lock belongs to another session; is there a connection pooler?")
        return Leadership(self._connection.fileno(), self.takeover, asked_at, on_lost)

    def close(self) -> None:
        self.engine.dispose()
        self._connection.close()

    def _ask(self, question: str, *values: Any) -> Any:
        with _answering(), self._connection.transaction():
            row = self._connection.execute(question, values).fetchone()
        return row[0] if row else None


def reader_engine(url: str) -> sa.Engine:
    def connect() -> Any:
        limits = {"statement_timeout": reading.SECONDS, "idle_in_transaction_session_timeout": reading.SECONDS}
        connection = _connect(url, limits, application_name="trainmedic history")
        connection.read_only = True
        return connection

    return _engine(
        connect,
        poolclass=pool.QueuePool,
        pool_size=database.READERS,
        max_overflow=0,
        pool_pre_ping=True,
        isolation_level="REPEATABLE READ",
    )


def allow_long_statements(connection: sa.Connection) -> None:
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
    connection.exec_driver_sql("SET LOCAL lock_timeout = '1min'")


def analyze_unknown_tables(connection: sa.Connection) -> None:
    """Without statistics, as after a restore, PostgreSQL reads whole tables for a few keys."""
    for table in connection.exec_driver_sql(_UNKNOWN_TABLES, (list(metadata.tables),)).scalars().all():
        connection.exec_driver_sql(f"ANALYZE {table}")


@contextmanager
def _answering() -> Iterator[None]:
    """Raise errors of the driver as StoreUnavailable."""
    import psycopg

    try:
        yield
    except psycopg.Error as error:
        raise database.unavailable("PostgreSQL does not answer", error) from error


def _engine(creator: Callable[[], Any], **options: Any) -> sa.Engine:
    # "format", because the store writes some statements with positional values.
    return sa.create_engine(
        "postgresql+psycopg://", creator=creator, paramstyle="format", use_native_hstore=False, **options
    )


def _connect(url: str, limits: Mapping[str, float], **more: Any) -> psycopg.Connection[Any]:
    import psycopg

    in_url = psycopg.conninfo.conninfo_to_dict(conninfo(url))
    # `limits` are settings of PostgreSQL by name, in seconds. `ours` are the client's: `connect_timeout` in seconds,
    # `tcp_user_timeout` in milliseconds.
    ours = {"connect_timeout": _CONNECT_SECONDS, "tcp_user_timeout": 10_000, **more}
    # The URL's options have priority, except the name, by which servers find each other.
    options = {name: value for name, value in ours.items() if name == "application_name" or name not in in_url}
    with _answering():
        try:
            connection = psycopg.connect(conninfo(url), **options)
        except psycopg.Error as error:
            if _PERMANENT_FAILURE.search(str(error)):
                raise errors.ConfigurationError(f"the database URL cannot be used: {error}") from error
            raise
    try:
        if connection.info.server_version < OLDEST * 10_000:  # 140005 is 14.5
            raise errors.ConfigurationError(
                f"PostgreSQL {OLDEST} or newer is needed; the database is {connection.info.server_version // 10_000}"
            )
        with _answering():
            for name, seconds in limits.items():
                connection.execute("SELECT set_config(%s, %s, false)", (name, f"{int(seconds * 1000)}"))
            connection.execute(_REQUIRE_DURABILITY)
            connection.commit()
    except BaseException:
        with suppress(psycopg.Error):
            connection.close()
        raise
    return connection


def _session_name(address: str) -> str:
    name = _NAME_PREFIX + address
    if len(name.encode()) <= _NAME_BYTES:
        return name
    # A cut address could lead standbys, with their clients' tokens, to another host.
    log.warning(
        "the advertised address is too long for PostgreSQL; standbys forward no requests",
        most_bytes=_NAME_BYTES - len(_NAME_PREFIX),
    )
    return _NAME_PREFIX


def _key_of(connection: psycopg.Connection[Any]) -> int:
    """Return the lock's key, which differs by schema: each can hold a store."""
    with _answering():
        row = connection.execute("SELECT current_schema()").fetchone()
        connection.commit()
    if row is None or row[0] is None:
        raise errors.ConfigurationError("the database's search_path names no existing schema; create one")
    digest = hashlib.sha256(f"trainmedic:{row[0]}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
