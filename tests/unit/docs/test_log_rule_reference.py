"""The reference of the log rules, and that of their tests, are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.unit.logs.test_shipped_rules import RULES
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.domain.log_sources import SOURCES
from trainmedic_logs.lines.matcher import FUNCTIONS
from trainmedic_logs.rules.log_rule_form import AlertForm, LogRuleForm
from trainmedic_logs.simulation.log_test_format import (
    FindingExpected,
    JobEntry,
    LineEntry,
    LogAlertExpected,
    VerdictExpected,
)

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "reference" / "log-rules.md").read_text(encoding="utf-8")
GUIDE = (DOCS / "how-to" / "write-a-log-rule.md").read_text(encoding="utf-8")


def keys(model: type[BaseModel]) -> set[str]:
    return {info.alias or name for name, info in model.model_fields.items()}


def rows(title: str) -> set[str]:
    (body,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    names = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", body, re.MULTILINE)
    return {name for row in names for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(("title", "model"), [("The document", LogRuleForm), ("The alert", AlertForm)])
def test_every_key_of_a_rule_is_in_the_reference(title: str, model: type[BaseModel]) -> None:
    """No other key is there."""
    assert rows(title) == keys(model)


@pytest.mark.parametrize("words", [Role, CauseClass, SOURCES, FUNCTIONS])
def test_every_word_of_the_language_is_in_the_reference(words: object) -> None:
    """Words are roles, causes, sources and functions."""
    assert isinstance(words, (tuple, dict)) or issubclass(words, str)  # type: ignore[arg-type]
    missing = [word for word in words if f"`{word}`" not in PAGE and f"`{word}(" not in PAGE]  # type: ignore[attr-defined]
    assert missing == []


def test_every_shipped_rule_is_in_the_reference() -> None:
    """It is there by its name, and no other rule is."""
    (body,) = re.findall(r"^## Shipped rules\n(.*)", PAGE, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([a-z-]+)`", body)) - {"logrules"}
    assert named == set(RULES.by_name)


@pytest.mark.parametrize("model", [JobEntry, LineEntry, FindingExpected, LogAlertExpected, VerdictExpected])
def test_every_key_of_a_test_is_in_its_guide(model: type[BaseModel]) -> None:
    """The guide describes lines and what is expected of them."""
    missing = [
        key for key in keys(model) - {"name", "ranks", "target"} if f"`{key}`" not in GUIDE and f"{key}:" not in GUIDE
    ]
    assert missing == []
