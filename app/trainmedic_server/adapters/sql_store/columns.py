"""Types of columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import asdict
from pydantic_core import PydanticSerializationError, to_json
from sqlalchemy.types import TypeDecorator

from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of, time_of


def encode_json(value: Any) -> str:
    if value == {}:
        return "{}"
    if value == []:
        return "[]"
    try:
        return str(to_json(value, inf_nan_mode="constants", fallback=_members), "utf-8")
    except PydanticSerializationError as error:
        raise TypeError(str(error)) from error


def _members(value: Any) -> dict[str, Any]:
    """Return a struct's members; raises TypeError for others. Outputs contain structs, such as the target."""
    if isinstance(value, Struct):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def decode_json(text: str) -> Any:
    if text == "{}":
        return {}
    return [] if text == "[]" else json.loads(text)


class TimeColumn(TypeDecorator[datetime]):
    """Whole microseconds since 1970, which sort and compare without time zones."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else microseconds_of(value)

    def process_result_value(self, value: int | None, dialect: sa.Dialect) -> datetime | None:
        return None if value is None else time_of(value)


Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
"""Sorted by bytes: PostgreSQL's other collations change with the operating system, which breaks indexes."""


class JsonColumn(TypeDecorator[Any]):
    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        return None if value is None else encode_json(value)

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        return None if value is None else decode_json(value)


_Convert = Callable[[Any], Any]
# Encoder and decoder, called without the `TypeDecorator`, and not for None.
_CONVERTED: dict[type[Any], tuple[_Convert, _Convert]] = {
    TimeColumn: (microseconds_of, time_of),
    JsonColumn: (encode_json, decode_json),
}


# `encoder` and `decoder` return None if values need no conversion.
def encoder(kind: sa.types.TypeEngine[Any], dialect: sa.Dialect) -> _Convert | None:
    if isinstance(kind, sa.Boolean) and not dialect.supports_native_boolean:
        return int  # SQLAlchemy's own function also checks the value
    own = _CONVERTED.get(type(kind))
    return own[0] if own else kind.bind_processor(dialect)


def decoder(kind: sa.types.TypeEngine[Any], dialect: sa.Dialect) -> _Convert | None:
    own = _CONVERTED.get(type(kind))
    return own[1] if own else kind.result_processor(dialect, None)


Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""Assigned by the database. SQLite does so only for a column of type INTEGER."""

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def partial_index(name: str, *columns: Any, where: str, unique: bool = False) -> None:
    """Define an index in SQLite's form. Only in-memory stores get it from here, others from migrations."""
    sa.Index(name, *columns, unique=unique, sqlite_where=sa.text(where))
