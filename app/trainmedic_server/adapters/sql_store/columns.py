"""How values are written in the columns of the run store's tables, and the tables' common registry."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from pydantic_core import PydanticSerializationError, to_json
from sqlalchemy.types import TypeDecorator

from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of, time_of

_PLAIN = {type(None): None, dict: "{}", list: "[]"}


def encode_json(value: Any) -> str:
    """Return the value as `JsonColumn` writes it. Raises TypeError."""
    try:
        return to_json(value, inf_nan_mode="constants").decode()
    except PydanticSerializationError as error:
        raise TypeError(str(error)) from error


class TimeColumn(TypeDecorator[datetime]):
    """An aware time, as whole microseconds since 1970: sorts, compares and ports without time zones."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else microseconds_of(value)

    def process_result_value(self, value: int | None, dialect: sa.Dialect) -> datetime | None:
        return None if value is None else time_of(value)


Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
"""Sorted by its bytes everywhere. PostgreSQL's other orders change with the operating system, and break indexes."""


class JsonColumn(TypeDecorator[Any]):
    """A JSON value as text. Nothing in the store looks inside one."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        if not value:
            return _PLAIN.get(type(value)) or encode_json(value)
        return encode_json(value)

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        if value == "{}":
            return {}
        if value == "[]":
            return []
        return None if value is None else json.loads(value)


Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""A number that the database gives; SQLite does so only for a column of exactly INTEGER."""

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def partial_index(name: str, *columns: Any, where: str, postgresql: str | None = None, unique: bool = False) -> None:
    """An index over the rows for which a condition holds, told in other words to PostgreSQL where it has others."""
    sa.Index(name, *columns, unique=unique, sqlite_where=sa.text(where), postgresql_where=sa.text(postgresql or where))
