"""Types of values in expressions, to check conditions when a playbook is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, TypeAlias

from msgspec import Struct


class ValueType(StrEnum):
    TEXT = "text"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    ANY = "any value"
    """Unknown or one of several types: nothing is checked."""


class Each(Struct, frozen=True):
    """Mapping whose values, or list whose entries, all have the shape ``value``."""

    value: Shape
    is_list: bool = False


Shape: TypeAlias = "ValueType | Each | Mapping[str, Shape]"

TEXT, NUMBER, BOOLEAN, ANY = ValueType
TEXTS = Each(TEXT)
TEXT_LIST = Each(TEXT, is_list=True)


def of_constant(value: Any) -> Shape:
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, (int, float)):
        return NUMBER
    if isinstance(value, str):
        return TEXT
    if isinstance(value, Mapping):
        return {str(key): of_constant(each) for key, each in value.items()}
    return ANY


def of_outputs(outputs: Collection[str]) -> Mapping[str, Shape]:
    """Return the shapes of outputs; `ANY` if only names are known."""
    return outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs, ANY)


def member(owner: Shape, name: str) -> Shape:
    if isinstance(owner, Each):
        return owner.value
    return owner.get(name, ANY) if isinstance(owner, Mapping) else ANY
