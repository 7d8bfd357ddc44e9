"""The examples of the guide to playbooks are playbooks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainmedic_core import yaml_text
from trainmedic_server.actions import registry
from trainmedic_server.catalog import compiler
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "write-a-playbook.md"
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.partition("\n")[0])
def test_each_example_is_a_valid_playbook(text):
    """It is complete and uses the current language, with existing actions and parameters."""
    (document,), problems = yaml_text.read(text, "guide")
    assert problems == []
    assert isinstance(compiler.compile_document(document, registry.specs_only()), YamlPlaybook)


def test_no_example_is_left_out():
    """All of the guide's YAML is checked."""
    assert len(EXAMPLES) == GUIDE.read_text().count("```yaml") > 5


def test_every_shipped_playbook_is_in_the_guide_and_no_other() -> None:
    """Its table has one row for each."""
    table = GUIDE.read_text().partition("## The shipped playbooks")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)
    folder = GUIDE.parents[2] / "playbooks"
    shipped = [path.stem for path in folder.glob("*.yaml") if not path.stem.endswith(("_test", "_template"))]
    assert sorted(listed) == sorted(shipped)
