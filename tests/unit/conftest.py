"""What all unit tests share: a pattern of a log rule is compiled once in a process."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from trainmedic_core.expressions import regexes

_compiled_once = functools.lru_cache(maxsize=4096)(regexes._compiled)


@pytest.fixture(autouse=True)
def patterns_compiled_once() -> Iterator[None]:
    """Keep compiled patterns from test to test: they are immutable, and compiling the shipped rules takes three
    quarters of a diagnosis."""
    compiled, regexes._compiled = regexes._compiled, _compiled_once
    yield
    regexes._compiled = compiled
