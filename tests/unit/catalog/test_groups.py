"""Groups in the playbook language: what loads, and what is refused with its cure."""

from __future__ import annotations

import pytest

from tests.unit.engine.world import ScriptedActions
from trainmedic_core.target import TargetKind
from trainmedic_server import errors
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook

BASE = """
playbook: rack
on: {alert: PDU}
target: {nodes: {rack: "{{ labels.rack }}"}}
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
"""


def compiled(text: str) -> YamlPlaybook:
    return loader.load_one(text, "rack.yaml", ScriptedActions())


def with_target(target: str) -> str:
    return BASE.replace('{nodes: {rack: "{{ labels.rack }}"}}', target)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("{nodes: all}", TargetKind.NODE),
        ("{gpus: {rack: [r1, r2], topology.example.com/row: a}}", TargetKind.GPU),
        ("{jobs: {on_nodes: 'n[1-4]'}}", TargetKind.JOB),
    ],
)
def test_selectors_load(target: str, kind: TargetKind) -> None:
    """All must be written out; a condition has one value or a list."""
    playbook = compiled(with_target(target))
    assert playbook.definition.target_kind is kind
    assert playbook.definition.group is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (with_target("{nodes: {}}"), "target.nodes"),
        (with_target("{nodes: everything}"), "target.nodes"),
        (with_target("{nodes: [n1, n2]}"), r"names are written as a condition: \{name: \[n1, n2\]\}"),
        (with_target("{nodes: 'n[1-4]'}"), r"write \{name: 'n\[1-4\]'\} for names"),
        (BASE + "rollout: {serial: '2'}\n", "write 2 without quotes"),
        (BASE + "rollout: {serial: -1}\n", "must be a whole number from 1"),
        (BASE + "rollout: {serial: 150%}\n", "is no percentage over 0% to 100%"),
        (BASE + "rollout: {max_errors: 150%}\n", "is no percentage from 0% to 100%"),
        (with_target("{nodes: {rack: []}}"), "target.nodes.rack"),
        (with_target("{nodes: all, gpus: all}"), "a playbook works on one group"),
        (with_target("{node: x, nodes: all}"), "unknown key 'node'"),
        (with_target("{jobs: on_node}"), "on_node needs a node"),
        (with_target("{nodes: {on_nodes: n1}}"), "on_nodes selects jobs; write {name"),
        (with_target("{nodes: {name: 'n[1-'}}"), r"the host list 'n\[1-' has a '\[' without its"),
        (with_target("{jobs: {on_nodes: [n1, 'n1]']}}"), r"the host list 'n1\]' has a '\]' without its"),
        (with_target("group"), "write a group as its selector"),
        (with_target("node") + "rollout: {serial: 1}", "rollout: only for a group"),
        (BASE + "rollout: {serial: 0}", "rollout.serial.*must be more than 0"),
        (BASE + "rollout: {serial: -1}", "must be a whole number from 1, or a percentage"),
        (BASE + "rollout: {serial: true}", "^[^']*true must be a whole number"),
        (BASE + "rollout: {max_errors: null}", "null must be a whole number from 0"),
        (BASE + "only_during: {schedule: '0 2 * * 2', duration: 0s}", "duration: must be longer than 0s"),
        (BASE + "rollout: {serial: 1.5}", "must be a whole number from 1, or a percentage"),
        (BASE + "rollout: {serial: 120%}", "is no percentage over 0% to 100%"),
        (BASE + "rollout: {max_errors: few}", "must be a whole number from 0, or a percentage"),
        (BASE + "rollout: {max_unavailable: few}", "must be a whole number from 0, or a percentage"),
        (
            with_target("{jobs: all}") + "rollout: {max_unavailable: 1}",
            "max_unavailable: counts nodes; a group of jobs has none",
        ),
        (BASE + "rollout: {order: idle}", "rollout.order"),
        (BASE + "  - {approve: sure?}", "with mode: approve, a person approves the whole list once"),
        (BASE + "on_failure: [{action: test.other}]", "belongs to its parent run, which cannot"),
        (
            BASE + "on_success: [{action: test.tell, when: steps.cap.status == 'failed'}]",
            "there is no step 'cap'|has not run",
        ),
        (BASE + "on_success: [{action: test.tell, when: target.node}]", "a target of kind group has no 'node'"),
        (BASE + "on_success: [{action: test.tell, when: group.fails > 1}]", "a group has no 'fails'"),
        (BASE.replace("undo: on_resolve", "when: group.failed"), "group"),
        (
            BASE + "rollout: {check: [{action: test.other}]}",
            "rollout.check.*|action test.other changes something; check of a group belongs to its parent run",
        ),
        (BASE + "rollout: {check: [{wait_for: {query: up}}]}", "wait_for: needs a timeout"),
        (BASE + "rollout: {check: [{approve: go on?, timeout: 0s}]}", "timeout: must be longer than 0s"),
        (BASE + "rollout: {check: [{id: cap, action: test.tell}]}", "the id 'cap' is used by an earlier step"),
        (BASE + "rollout: {check: [{action: test.tell, when: steps.cap.status}]}", "'cap' has not run here"),
        (BASE + "rollout: {check: [{action: test.tell, when: group.fails}]}", "a group has no 'fails'"),
        (BASE + "rollout: {check: [{action: test.tell, wait: 5m}]}", "a step has exactly one of action, wait_for"),
        (BASE + "rollout: {check: [notify]}", r"rollout.check\[0\]"),
        (BASE + "rollout: {check: [{action: test.tell, on_fail: x}]}", "unknown key 'on_fail'"),
        (BASE + "rollout: {check: {wait: 5m}}", "rollout.check: must be a list"),
        (
            BASE.replace("alert: PDU", "manual: {}").replace("on_resolve", "never").replace("{{ labels.rack }}", "r1")
            + "rollout: {check: [{wait_for: resolved}]}",
            "wait_for: resolved needs an alert",
        ),
        (BASE + "effect: {query: up, better: lower}", "is not measured for a group"),
    ],
)
def test_mistakes_are_rejected(text: str, why: str) -> None:
    """The message names the field and the correction."""
    with pytest.raises(errors.PlaybookError, match=why):
        compiled(text)


def test_the_parents_steps_know_the_counts() -> None:
    """They are those of the group, not of a member; the last steps know the check."""
    check = "check: [{id: fits, approve: 'After batch {{ group.batch }}?'}, {wait: 5m, when: steps.fits.output.by}]"
    compiled(f"{BASE}rollout: {{{check}}}\non_failure: [{{action: test.tell, when: steps.fits.error}}]")
    compiled(BASE + "on_failure: [{action: test.tell, when: group.failed > 1 and group.total > group.succeeded}]")
