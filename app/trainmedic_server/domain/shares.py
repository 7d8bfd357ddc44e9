"""Numbers of members, given as such or as a percentage."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from trainmedic_core.problems import shown


class Percentage(float):
    """From 0 to 100."""


def _read_share(value: Any) -> float:
    if isinstance(value, str) and value.isdigit():
        raise ValueError(f"write {value} without quotes")
    if isinstance(value, str) and value.endswith("%"):
        try:
            share = float(value[:-1])
        except ValueError:
            share = -1.0
        if not 0 <= share <= 100:
            raise ValueError(f"{value!r} is no percentage from 0% to 100%")
        return Percentage(share)
    if isinstance(value, (Percentage, int)) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"{shown(value)} must be a whole number from 0, or a percentage such as 10%")


def _read_batch(value: Any) -> float:
    try:
        size = _read_share(value)
    except ValueError as error:
        # A batch of 0 members is refused too.
        wrong = str(error).replace("from 0%", "over 0%").replace("from 0,", "from 1,")
        raise ValueError(wrong) from None
    if size <= 0:
        raise ValueError("must be more than 0")
    return size


_ShareSchema = WithJsonSchema(
    {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?%$"}]}
)
Batch = Annotated[float, PlainValidator(_read_batch), _ShareSchema]
Share = Annotated[float, PlainValidator(_read_share), _ShareSchema]


def part_of(share: float, total: int, *, up: bool = False) -> int:
    """Return the share's number of members. Only a `Percentage` depends on `total`; it rounds down, or `up`."""
    if not isinstance(share, Percentage):
        return int(share)
    part = round(share * total / 100, 9)  # float errors must not change the whole number
    return math.ceil(part) if up else int(part)
