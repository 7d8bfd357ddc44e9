"""Field types for pydantic models."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from trainmedic_core import duration


def _read(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str):
        return duration.parse(value)
    raise ValueError(f"{value!r} is not a duration; write it with its unit: 90s, 10m, 1h30m")


Duration = Annotated[
    timedelta,
    BeforeValidator(_read),
    PlainSerializer(duration.write, return_type=str),
    WithJsonSchema({"type": "string", "pattern": duration.PATTERN, "examples": ["90s", "10m", "1h30m"]}),
]
Lookback = Annotated[Duration, AfterValidator(duration.check_back)]

Identifier = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,126}[A-Za-z0-9])?$",
        description="Letters, digits, and '-', '_', '.' between them; at most 128.",
    ),
]
Expression = Annotated[str, Field(min_length=1, description="A Jinja2 expression, without braces.")]
