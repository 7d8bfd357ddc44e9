"""The reference of the playbook language, and that of its tests, are complete."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel

from trainmedic_core import yaml_text
from trainmedic_core.expressions import evaluation, sandbox
from trainmedic_server.catalog import scope_check
from trainmedic_server.domain import fragment, playbook
from trainmedic_server.domain.run import StepStatus
from trainmedic_server.simulation import suite_format

DOCS = Path(__file__).parents[3] / "docs"
LANGUAGE = (DOCS / "reference" / "playbooks.md").read_text(encoding="utf-8")
TESTS = (DOCS / "how-to" / "test-playbooks.md").read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    (body,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return str(body)


def keys(model: type[BaseModel]) -> set[str]:
    return {info.alias or name for name, info in model.model_fields.items()}


def rows(text: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("title", "models"),
    [
        ("The document", [playbook.Playbook]),
        ("on", [playbook.Trigger]),
        ("target", [playbook.TargetParts]),
        ("Groups", [playbook.GroupTarget, playbook.Rollout]),
        ("guards", [playbook.Guards]),
        ("effect", [playbook.MeasuredEffect]),
        (
            "steps",
            [
                playbook.ActionStep,
                playbook.WaitStep,
                playbook.PollStep,
                playbook.DelayStep,
                playbook.UntilStep,
                playbook.PolledQuery,
                playbook.PolledAction,
                playbook.ApproveStep,
                fragment.UseStep,
            ],
        ),
    ],
)
def test_every_key_of_the_language_is_in_the_reference(title: str, models: Iterable[type[BaseModel]]) -> None:
    """No other key is there."""
    assert rows(section(LANGUAGE, title)) == {key for model in models for key in keys(model)}


def test_every_key_of_a_retry_and_of_a_rate_limit_is_in_the_reference() -> None:
    """They have no table of their own."""
    for key in keys(playbook.Retry) | keys(playbook.RateLimit):
        assert f"`{key}" in LANGUAGE or f"{key}}}`" in LANGUAGE, key


def test_names_filters_and_statuses_are_in_the_reference() -> None:
    """They are those that expressions can use."""
    spoken = section(LANGUAGE, "Expressions and templates")
    for name in (*scope_check.STEP_NAMES, *sandbox.FILTERS):
        assert f"`{name}`" in spoken, name
    ended = [status for status in StepStatus if status.is_final]
    assert all(f"`{status}`" in section(LANGUAGE, "steps") for status in ended)


def test_the_bounds_are_those_of_the_reader() -> None:
    """A number in a page becomes outdated; this test keeps it current."""
    assert f"{yaml_text.MAX_VALUES:,} values" in LANGUAGE
    assert f"{yaml_text.MAX_DEPTH} levels" in LANGUAGE
    assert f"{evaluation.LONGEST_TEXT:,} characters" in LANGUAGE


@pytest.mark.parametrize(
    "model",
    [
        suite_format.SuiteEntry,
        suite_format.TestEntry,
        suite_format.AlertEntry,
        suite_format.OrderEntry,
        suite_format.Check,
        suite_format.RunExpected,
        suite_format.StepExpected,
        suite_format.UndoExpected,
        suite_format.CallExpected,
    ],
)
def test_every_key_of_the_test_format_is_in_its_guide(model: type[BaseModel]) -> None:
    """It stands in a table or in the text."""
    missing = [key for key in keys(model) if not re.search(rf"`[^`]*\b{key}\b[^`]*`", TESTS)]
    assert not missing
    assert all(f"`{deed}`" in TESTS for deed in suite_format.SimulatedOperation)
    assert all(f"`{outcome}" in TESTS for outcome in suite_format.ReplyOutcome)
