"""The playbooks that are shipped: they load, and do what the tests beside them say."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_core import yaml_files
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.domain.claim import Claim
from trainmedic_server.domain.playbook import ActionStep
from trainmedic_server.engine import claims
from trainmedic_server.simulation import suite

PLAYBOOKS = Path(__file__).parents[3] / "playbooks"
SUITES = sorted(PLAYBOOKS.glob(f"*{yaml_files.TEST_SUFFIX}.yaml"))
EXAMPLES = sorted((PLAYBOOKS.parent / "examples").glob(f"*/*{yaml_files.TEST_SUFFIX}.yaml"))
TEMPLATES = set(PLAYBOOKS.glob("*_template.yaml"))
FILES = sorted(set(PLAYBOOKS.glob("*.yaml")) - set(SUITES) - TEMPLATES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_playbook_has_its_name_and_its_tests(path):
    """One playbook a file, of the file's name, with a test file beside it."""
    loaded = loader.load_file(path, registry.specs_only())
    assert loaded.problems == ()
    assert [book.definition.name for book in loaded.playbooks] == [path.stem]
    assert path.with_name(f"{path.stem}{yaml_files.TEST_SUFFIX}.yaml") in SUITES


@pytest.mark.parametrize("path", [*SUITES, *EXAMPLES], ids=lambda path: path.stem)
def test_a_shipped_playbook_does_what_its_tests_say(path):
    """All of them."""
    result = suite.run_file(path, registry.specs_only())
    assert [str(problem) for problem in result.problems] == []
    assert [str(failure) for test in result.results for failure in test.failures] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_playbook_tells_people_when_it_failed(path):
    """By the server's message, or by one of its own before anything else is done or waited for; and a server without a
    notification channel makes that no failure of its own."""
    (book,) = loader.load_file(path, registry.specs_only()).playbooks
    if not book.definition.on_failure:
        return
    first, *others = book.definition.on_failure
    assert (first.action, first.on_error) == ("notify", "continue")
    assert not [step for step in others if getattr(step, "action", None) == "notify"]


def acts_of(book):
    definition = book.definition
    steps = [*definition.steps, *definition.on_success, *definition.on_failure]
    return {step.action for step in steps if isinstance(step, ActionStep)}


def test_only_the_cleaning_of_a_full_disk_locks_less_than_its_target():
    """Every other one that changes anything drains the node: it locks all but the disks, and waits for no cleaning. One
    that only notifies people locks nothing, so that its message does not wait for a repair."""
    node, actions = Target(TargetKind.NODE, node="n1"), registry.specs_only()
    books = [book for path in FILES for book in loader.load_file(path, actions).playbooks]
    on_nodes = {book.definition.name: book for book in books if book.definition.target_kind is TargetKind.NODE}
    claimed = {name: claims.of_playbook(book, node, actions) for name, book in on_nodes.items()}
    assert claimed.pop("disk-space-low") == Claim.of_disks("n1")
    assert claimed.pop("disk-space-not-cleaned").nothing
    nothing = {name for name, claim in claimed.items() if claim.nothing}
    assert nothing == {name for name in claimed if acts_of(on_nodes[name]) <= {"notify", "node.facts"}}
    locking = {name: claim for name, claim in claimed.items() if name not in nothing}
    assert len(locking) > 1
    assert list(locking.values()) == [Claim(node, leaves_disks=True)] * len(locking)
