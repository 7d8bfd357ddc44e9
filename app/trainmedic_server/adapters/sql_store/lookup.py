"""Lookup of rows by a list of keys. A select is compiled once for a few list lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from trainmedic_server.adapters.sql_store.columns import Text, decoder

KEYS: sa.BindParameter[Any] = sa.bindparam("keys", expanding=True)
"""Placeholder of the list, used once: ``column.in_(KEYS)``. Keys are text."""

WANTED = sa.values(sa.column("key", Text), name="wanted").data([(sa.bindparam(KEYS.key, type_=Text),)]).cte("wanted")
"""The keys as a table, to query each separately: ``sa.select(WANTED.c.key, ...)``."""

# A placeholder may have a type: %s::VARCHAR COLLATE "C". A list of constants begins with a quote.
_LIST = re.compile(r"(.* IN \(|.*\(VALUES )(\(?(?:\?|%s)[^,()]*\)?)(\).*)", re.DOTALL)

_LENGTHS = (1, 4, 16, 64, 256)  # A list between two of them repeats its last key up to the next.

Row = tuple[Any, ...]
Converters = Sequence[tuple[int, Callable[[Any], Any]]]


class Lookup:
    def __init__(self, statement: sa.Select[Any]) -> None:
        self.statement = statement
        self._prepared: dict[str, _Prepared] = {}

    def rows(self, connection: sa.Connection, keys: Collection[str], **others: Any) -> list[Row]:
        """`others` are the select's further values. The select's order holds within each list of at most 256 keys."""
        dialect = connection.dialect
        prepared = self._prepared.get(dialect.name)
        if prepared is None:
            prepared = self._prepared[dialect.name] = _Prepared(self.statement, dialect)
        distinct = list(dict.fromkeys(keys))
        longest = _LENGTHS[-1]
        rows: list[Row] = []
        for start in range(0, len(distinct), longest):
            rows += prepared.rows(connection, distinct[start : start + longest], others)
        return rows


class _Prepared:
    def __init__(self, statement: sa.Select[Any], dialect: sa.Dialect) -> None:
        parameters = statement.compile(dialect=dialect).binds
        required = {name for name, parameter in parameters.items() if parameter.required}
        # Compile the statement with one key, whose text is then repeated for each length.
        filled = statement.params({**dict.fromkeys(required), KEYS.key: [""]})
        compiled = filled.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})
        text, names = str(compiled), list(compiled.positiontup or ())
        match = _LIST.fullmatch(text)
        [place] = [place for place, name in enumerate(names) if name.startswith(KEYS.key)]
        del names[place]
        if match is None:
            raise ValueError("the select has no list of keys")
        before, key, after = match.groups()
        self._texts = {n: f"{before}{', '.join([key] * n)}{after}" for n in _LENGTHS}
        binders = [_binder(parameters[name], name in required, dialect) for name in names]
        self._before, self._after = binders[:place], binders[place:]
        decoders = [(i, decoder(column.type, dialect)) for i, column in enumerate(filled.selected_columns)]
        self._decoders = [(place, decode) for place, decode in decoders if decode is not None]

    def rows(self, connection: sa.Connection, keys: list[str], others: dict[str, Any]) -> list[Row]:
        length = next(length for length in _LENGTHS if length >= len(keys))
        values = [bind(others) for bind in self._before]
        values += keys
        values += keys[-1:] * (length - len(keys))
        values += [bind(others) for bind in self._after]
        found = execute(connection, self._texts[length], values, fetches=True)
        return [tuple(converted(row, self._decoders)) for row in found]


def execute(connection: sa.Connection, text: str, values: Sequence[Any], *, fetches: bool) -> list[Row]:
    """Execute `text` by the driver, in the connection's transaction, because SQLAlchemy's way costs more than SQLite's.

    Raises SQLAlchemy's errors. Without `fetches`, returns no rows.
    """
    dbapi = connection.dialect.loaded_dbapi
    try:
        cursor = connection.connection.cursor()
        cursor.execute(text, tuple(values))
        rows: list[Row] = list(cursor.fetchall()) if fetches else []
        cursor.close()
    except dbapi.Error as error:
        raise exc.DBAPIError.instance(text, None, error, dbapi.Error, dialect=connection.dialect) from error
    return rows


def converted(row: Sequence[Any], converters: Converters) -> list[Any]:
    values = list(row)
    for place, convert in converters:
        value = values[place]
        if value is not None:
            values[place] = convert(value)
    return values


def _binder(
    parameter: sa.BindParameter[Any], from_caller: bool, dialect: sa.Dialect
) -> Callable[[dict[str, Any]], Any]:
    encode: Callable[[Any], Any] = parameter.type.bind_processor(dialect) or (lambda value: value)
    if from_caller:
        return lambda values: encode(values[parameter.key])
    constant = encode(parameter.effective_value)
    return lambda values: constant
