"""The JSON Schema agrees with the checks."""

from __future__ import annotations

import jsonschema_rs
import pytest

from tests.unit.catalog.actions import PLAYBOOK, TestActions
from trainmedic_core import yaml_text
from trainmedic_server.catalog.schema import json_schema


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (PLAYBOOK, True),
        (PLAYBOOK.replace("steps_back: 100", "steps_back: '{{ labels.n }}', skip: ['{{ 1 }}', 2]"), True),
        (PLAYBOOK.replace("steps_back: 100", "steps_back: 0"), False),
        (PLAYBOOK.replace("steps_back", "step_back"), False),
        (PLAYBOOK.replace("test.rollback", "test.rollbak"), False),
        (PLAYBOOK + "  - {wait_for: resolved, timeout: 5m}\n  - {approve: sure?}\n", True),
        (PLAYBOOK + "  - {wait_for: resolved, timeout: 5x}\n", False),
        (PLAYBOOK.replace("target: job", "target: {node: '{{ labels.x }}'}"), True),
        (PLAYBOOK.replace("target: job", "target: jobs"), False),
    ],
)
def test_an_editor_accepts_what_the_checks_accept(text: str, valid: bool) -> None:
    """Each action's parameters are checked by the action's name, and any of them may be a template."""
    (document,), _ = yaml_text.read(text, "f")
    assert jsonschema_rs.validator_for(json_schema(TestActions())).is_valid(document.value) is valid
