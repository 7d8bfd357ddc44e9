"""Sentences with parts that surfaces lay out differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct


class At(Struct, frozen=True):
    """A time in the API's format."""

    time: str


class RunName(Struct, frozen=True):
    run_id: str


class Values(Struct, frozen=True):
    """Named values, such as parameters."""

    values: Mapping[str, Any]


Piece = str | At | RunName | Values
Sentence = tuple[Piece, ...]


def joined(sentence: Sentence, write: Callable[[Piece], str]) -> str:
    """Return the text; `write` returns that of one piece."""
    return "".join(map(write, sentence)).strip()
