"""Texts as numbers, times and durations: filters that refuse what they cannot read, and their types at loading."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.world import ScriptedActions
from trainmedic_core.errors import ExpressionError
from trainmedic_core.expressions.evaluation import compile_expression
from trainmedic_server.catalog import loader
from trainmedic_server.errors import PlaybookError


def value(text: str, **scope: Any) -> Any:
    return compile_expression(text, "when").evaluate(scope)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("' 80 ' | number", 80),
        ("'-1.5e3' | number", -1500.0),
        ("'.5' | number", 0.5),
        ("7 | number", 7),
        ("'1970-01-01T01:00:00+01:00' | time", 0.0),
        ("'1970-01-02T00:00:00Z' | time", 86400.0),
        ("'1h30m' | duration", 5400.0),
        ("5400 | duration", "1h30m"),
        ("'300' | duration", "5m"),
        ("x.y.z | default('2') | number", 2),
    ],
)
def test_a_text_is_parsed(text: str, expected: Any) -> None:
    """The label and all its parents may be missing."""
    assert value(text, x={}) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("'hot' | number", "'hot' is not a number"),
        ("'' | number", "is not a number"),
        ("'1_000' | number", "is not a number"),
        ("'nan' | number", "is not a number"),
        ("true | number", "is not a number"),
        ("x.y | number", "there is no 'y' here"),
        ("'2026-01-31T12:00:00' | time", "not a time with its zone"),
        ("5 | time", "not a time with its zone"),
        ("'soon' | duration", "soon"),
    ],
)
def test_an_invalid_text_is_an_error(text: str, named: str) -> None:
    """``float`` would turn it into 0."""
    with pytest.raises(ExpressionError, match=named):
        value(text, x={})


def loaded(when: str) -> None:
    text = f"playbook: p\non: {{alert: A}}\ntarget: node\nsteps:\n  - {{when: {when!r}, action: test.cap}}\n"
    loader.load_one(text, "p.yaml", ScriptedActions())


@pytest.mark.parametrize(
    "when",
    [
        "labels.temp | number > 80",
        "now - (alert.startsAt | time) > 600",
        "now - (alert.startsAt | time) > ('10m' | duration)",
        "(labels.age | duration) > 60",
    ],
)
def test_comparisons_with_numbers_are_accepted(when: str) -> None:
    """``now`` is one, too."""
    loaded(when)


@pytest.mark.parametrize(
    "when", ["now > alert.startsAt", "now == '9'", "(now | duration) > 5", "labels.t | time == 'a'"]
)
def test_comparisons_with_texts_are_rejected(when: str) -> None:
    """The error names file and line."""
    with pytest.raises(PlaybookError, match=r"p\.yaml:5"):
        loaded(when)
