"""Insert of tuples in column order, without `seq`.

A row whose key exists is an error, or by `on_conflict`:

- ``ignore``: skipped;
- ``update``: replaces the columns in `update`, None for all but the key;
- ``add``: adds to these columns.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store.columns import encoder
from trainmedic_server.adapters.sql_store.lookup import converted, execute

_COUNTS = (128, 64, 32, 16, 8, 4, 2, 1)  # Rows per statement: few values, so that drivers reuse prepared statements.
OnConflict = Literal["error", "ignore", "update", "add"]
_VALUES = re.compile(r"(.*VALUES )(\([^()]*\))(.*)", re.DOTALL)


class BulkInsert:
    def __init__(
        self,
        dialect: sa.Dialect,
        table: sa.Table,
        on_conflict: OnConflict = "error",
        update: Sequence[str] | None = None,
    ) -> None:
        columns = [column for column in table.columns if column.name != "seq"]
        insert = importlib.import_module(f"sqlalchemy.dialects.{dialect.name}").insert
        statement = insert(table).values({column.name: sa.bindparam(column.name) for column in columns})
        if on_conflict == "ignore":
            statement = statement.on_conflict_do_nothing()
        elif on_conflict != "error":
            key = [column.name for column in table.primary_key]
            changed = update if update is not None else [c.name for c in columns if not c.primary_key]
            values = {name: statement.excluded[name] for name in changed}
            if on_conflict == "add":
                values = {name: table.c[name] + value for name, value in values.items()}
            statement = statement.on_conflict_do_update(index_elements=key, set_=values)
        match = _VALUES.fullmatch(str(statement.compile(dialect=dialect)))
        if match is None:
            raise ValueError(f"unexpected form of the statement for table {table.name}")
        before, group, after = match.groups()
        self._texts = [(n, f"{before}{', '.join([group] * n)}{after}") for n in _COUNTS]
        encoders = [(place, encoder(column.type, dialect)) for place, column in enumerate(columns)]
        self._encoders = [(place, encode) for place, encode in encoders if encode is not None]

    def run(self, connection: sa.Connection, rows: Iterable[Sequence[Any]]) -> None:
        encoded = [converted(row, self._encoders) for row in rows]
        if not encoded:  # of most tables a transaction writes nothing
            return
        start, left = 0, len(encoded)
        for count, text in self._texts:
            while left >= count:
                values = [value for row in encoded[start : start + count] for value in row]
                execute(connection, text, values, fetches=False)
                start += count
                left -= count


_made: dict[tuple[str, str, str], BulkInsert] = {}  # by dialect, table and conflict rule; shared by all stores


class UnitRecords:
    """Records in a unit of work. `connection()` ensures the unit's savepoint."""

    def __init__(self, connection: Callable[[], sa.Connection]) -> None:
        self._connection = connection

    def _write(self, table: sa.Table, rows: Sequence[Sequence[Any]], on_conflict: OnConflict = "update") -> None:
        if rows:
            connection = self._connection()
            key = (connection.dialect.name, table.name, on_conflict)
            if key not in _made:
                _made[key] = BulkInsert(connection.dialect, table, on_conflict)
            _made[key].run(connection, rows)
