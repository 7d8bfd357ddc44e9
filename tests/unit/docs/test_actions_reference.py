"""The reference of the actions is complete, and says nothing that is not so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainmedic_core import duration
from trainmedic_core.target import TargetKind
from trainmedic_server.actions import registry
from trainmedic_server.catalog import written_actions

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "actions.md"
SECTIONS = {
    match[1]: match[2]
    for match in re.finditer(r"^### `([^`]+)`\n(.*?)(?=^##|\Z)", REFERENCE.read_text(), re.MULTILINE | re.DOTALL)
}


def test_the_reference_lists_exactly_the_existing_actions():
    """Each registered action has its section, and each section its action."""
    assert sorted(SECTIONS) == sorted(spec.name for spec in registry.BUILT_IN)


@pytest.mark.parametrize("spec", registry.BUILT_IN, ids=lambda spec: spec.name)
def test_the_reference_has_every_parameter(spec):
    """Each has its name as a playbook writes it, and required ones are marked."""
    rows = dict(re.findall(r"^\| `([^`]+)` \|[^|]+(?:\\\|[^|]+)*\| ([^|]+) \|", SECTIONS[spec.name], re.MULTILINE))
    fields = {field.alias or name: field for name, field in spec.Params.model_fields.items()}
    assert sorted(rows) == sorted(fields)
    assert all(rows[name].startswith("required") for name, field in fields.items() if field.is_required())


@pytest.mark.parametrize("spec", registry.BUILT_IN, ids=lambda spec: spec.name)
def test_the_reference_has_targets_timeout_and_undo(spec):
    """They are as the action declares; what all actions of a chapter share is stated once, at its start."""
    section = SECTIONS[spec.name]
    if spec.name.startswith("job."):
        assert spec.targets == {TargetKind.JOB}
    else:
        (targets,) = re.findall(r"^- \*\*Targets\*\*: (.+)$", section, re.MULTILINE)
        assert set(targets.split(", ")) == {str(kind) for kind in spec.targets}
    (timeout,) = re.findall(r"^- \*\*Timeout\*\*: (\S+)$", section, re.MULTILINE)
    assert duration.parse(timeout) == spec.default_timeout
    assert ("- **Undo**: " in section) == written_actions.can_be_undone(spec)
