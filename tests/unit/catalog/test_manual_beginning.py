"""Checks of playbooks that people start."""

from __future__ import annotations

import pytest

from tests.unit.catalog.actions import problems_of

GOOD = """playbook: p
on:
  manual:
    inputs: {nodes: {type: nodes, default: [n1]}, limit: {type: number, default: 3}}
target: cluster
steps:
  - {id: a, when: inputs.limit > 2, action: test.tell, with: {message: "{{ inputs.nodes }}"}}
"""


def problems(text: str) -> list[str]:
    return problems_of(text)


def test_a_playbook_with_typed_inputs_loads() -> None:
    """Its steps see the declared names."""
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("inputs.limit >", "inputs.limt >", "the playbook has no input 'limt'; did you mean 'limit'?"),
        ("default: 3", "default: three", "default: 'three' is not a number"),
        ("default: 3", "default: 3, required: true", "default: a required input has none"),
        ("type: number", "type: int", "'int' is not one of"),
        ("on:\n", "on:\n  alert: Hot\n", "names one beginning: alert or manual, not both"),
        ("on:\n", "on:\n  when: labels.x\n", "manual has none"),
        ("steps:\n", "steps:\n  - {wait_for: resolved, timeout: 5m}\n", "wait_for: resolved needs an alert"),
        ('nodes }}"}', 'nodes }}"}, undo: on_resolve', "undo: on_resolve needs an alert"),
    ],
)
def test_a_mistake_is_reported(old: str, new: str, message: str) -> None:
    """The message states the correction, if there is one."""
    assert old in GOOD
    found = problems(GOOD.replace(old, new, 1))
    assert any(message in each for each in found), found


def test_inputs_are_unknown_without_a_declaration() -> None:
    """A playbook for an alert has none."""
    text = GOOD.replace(
        "  manual:\n    inputs: {nodes: {type: nodes, default: [n1]}, limit: {type: number, default: 3}}",
        "  alert: Hot",
    )
    assert any("inputs" in each for each in problems(text))


@pytest.mark.parametrize(
    ("on", "told"),
    [
        ("{manual: {}}", ["the playbook has no input 'a'; declare it under on.manual.inputs"]),
        ("{alert: A}", ["there is no name 'inputs' here; constants are under vars: vars.name"]),
    ],
)
def test_an_undeclared_input_is_one_error(on: str, told: list[str]) -> None:
    """The remedy fits the trigger."""
    step = "{action: test.tell, with: {message: '{{ inputs.a }}'}}"
    found = problems(f"playbook: p\non: {on}\ntarget: cluster\nsteps:\n  - {step}\n")
    assert [problem.partition("message: ")[2] for problem in found] == told
