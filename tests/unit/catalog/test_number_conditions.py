"""Conditions over numbers say what the sandbox says, or leave the answer to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from trainmedic_core import errors
from trainmedic_core.expressions.evaluation import compile_expression
from trainmedic_core.expressions.number_conditions import Condition, MissingMember, number_condition
from trainmedic_logs.lines.matcher import FUNCTIONS

ABSENT = object()
VALUES = (ABSENT, None, 2.5, -1, 0, 5e3, math.nan, math.inf, True, "nan", "", 1 << 70, [1], {"a": 1})
SHIPPED = ("fields.loss > 1e3", 'not is_finite(fields.get("loss")) or is_nan(fields.get("grad_norm"))')
WRITTEN = (
    "fields.loss == 0 and not fields.grad_norm >= 2.5",
    "is_nan(fields.loss) or fields.grad_norm != fields.loss",
    'fields.get("loss") < 1 or fields.get("get")',
    "fields.loss",
)


def compiled(text: str) -> Condition | None:
    """As a rule over records has it."""
    return number_condition(text, "fields", FUNCTIONS)


def told(text: str, fields: Mapping[str, Any]) -> bool | None:
    """What the sandbox says; None for an error."""
    try:
        return compile_expression(text, "when").holds({"fields": fields, **FUNCTIONS})
    except errors.ExpressionError:
        return None


@pytest.mark.parametrize("text", [*SHIPPED, *WRITTEN])
def test_each_answer_equals_the_sandboxs(text: str) -> None:
    """Records may contain values that are no numbers, lack members, or hide the method `get`."""
    condition, answered = compiled(text), 0
    assert condition is not None
    for loss, norm, hidden in product(VALUES, VALUES, (ABSENT, 3.0)):
        given = {"loss": loss, "grad_norm": norm, "get": hidden}
        fields = {name: value for name, value in given.items() if value is not ABSENT}
        try:
            holds = condition(fields)
        except MissingMember:
            assert told(text, fields) is None, fields
            continue
        if holds is None:
            continue  # the sandbox is asked
        answered += 1
        assert holds is told(text, fields), fields
    assert answered >= len(VALUES)


def test_a_missing_member_needs_no_sandbox() -> None:
    """Most steps lack the members of most conditions."""
    condition = compiled("fields.data_share > 0.5")
    assert condition is not None
    with pytest.raises(MissingMember):
        condition({"loss": 2.5})


@pytest.mark.parametrize(
    "text",
    [
        "fields.kind | lower == 'fatal'",
        "fields.loss is not defined",
        "fields.loss + 1 > 2",
        "0 < fields.loss < 1",
        "fields.loss > other.loss",
        "len(fields.loss) > 1",
        "fields.get('loss', 0) > 1",
        "fields.loss.real > 1",
        "is_nan(*fields.loss)",
        "source == 'training'",
        "fields.loss > '1'",
    ],
)
def test_conditions_on_more_than_numbers_use_the_sandbox(text: str) -> None:
    """Only conditions known to mean the same in both are compiled."""
    assert compiled(text) is None
