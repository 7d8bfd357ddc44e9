"""A compiled playbook answers: does it react, on what, and with which parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.catalog.actions import PLAYBOOK, alert, playbook_of
from trainmedic_core import errors
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import inventory
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.topology import Topology
from trainmedic_server.ports.playbooks import CompiledPlaybook, Match

SCOPE: dict[str, Any] = {"labels": {"n": "7", "word": "x"}, "steps": {}, "run": {"id": "r1"}}


def playbook_with(step: str) -> CompiledPlaybook:
    return playbook_of(PLAYBOOK + f"  - {step}\n")


def test_it_reacts_to_its_alertnames_matchers_and_condition() -> None:
    """Each reason for no reaction is reported, with the value that failed."""
    playbook = playbook_of(
        PLAYBOOK.replace(
            "alert: TrainingLossSpike",
            "alert: [A, TrainingLossSpike]\n  matchers: ['severity=~\"a|b\"']\n  when: labels.runbook is not defined",
        )
    )
    assert playbook.match(alert(severity="a")) == Match(True)
    assert playbook.match(alert("Other")).why == "alertname is 'Other', not 'A' or 'TrainingLossSpike'"
    assert playbook.match(alert(severity="c")).why == "'severity' is 'c' and must match a|b"
    refused = playbook.match(alert(severity="b", runbook="x"))
    assert (refused.matched, refused.failed) == (False, False)
    assert refused.why.startswith("on.when does not hold")


@pytest.mark.parametrize(
    ("condition", "labels"),
    [("when: labels.team == 'x'", {}), ("matchers: ['note=~\".{1000}\"']", {"note": "x" * 50_000})],
)
def test_a_condition_that_cannot_be_evaluated_does_not_match_and_is_reported(
    condition: str, labels: dict[str, str]
) -> None:
    """It is marked as failed, so that the history can report it."""
    playbook = playbook_of(PLAYBOOK.replace("  alert:", f"  {condition}\n  alert:"))
    match = playbook.match(alert(**labels))
    assert (match.matched, match.failed) == (False, True)


def known_by(written: dict[str, str]) -> Topology:
    return Topology(inventory.parse(written))


def test_the_target_comes_from_the_labels() -> None:
    """The built-in chain is used if the playbook names a kind."""
    assert playbook_of(PLAYBOOK).target_of(alert(job_name="llm-1"), Topology()) == Target(TargetKind.JOB, job="llm-1")
    assert isinstance(playbook_of(PLAYBOOK).target_of(alert(), Topology()), Unresolved)


def test_the_target_comes_from_the_playbooks_templates() -> None:
    """They are used if the playbook names the parts; addresses are looked up, and nothing is guessed."""
    text = PLAYBOOK.replace("target: job", "target: {node: '{{ labels.host }}', gpu: '{{ labels.card }}'}")
    playbook = playbook_of(text.replace("test.rollback", "test.tell").replace("steps_back: 100", "message: hot"))
    assert playbook.target_of(alert(host="n1", card="0"), Topology()) == Target(TargetKind.GPU, node="n1", gpu="0")
    assert playbook.target_of(alert(host="10.0.0.1:9400", card="0"), known_by({"10.0.0.1": "n2"})) == Target(
        TargetKind.GPU, node="n2", gpu="0"
    )
    for labels in ({"host": "n1"}, {"host": "n1", "card": " "}, {"host": "10.0.0.1", "card": "0"}):
        refused = playbook.target_of(alert(**labels), Topology())
        assert isinstance(refused, Unresolved), labels
        assert refused.reason == "target_unknown"


def test_constant_parameters_are_checked_once() -> None:
    """They are the same object for every run."""
    playbook = playbook_of(PLAYBOOK)
    assert playbook.params("steps", 0, SCOPE) is playbook.params("steps", 0, {})
    assert playbook.params("steps", 0, SCOPE).model_dump()["steps_back"] == 100


def test_rendered_parameters_are_checked_when_they_are_known() -> None:
    """Text that the models accept is also accepted from a template."""
    playbook = playbook_with(
        "{action: test.rollback, with: {steps_back: '{{ labels.n }}', wait: '{{ 90 | duration }}'}}"
    )
    assert playbook.params("steps", 1, SCOPE).model_dump()["steps_back"] == 7


def test_a_number_from_a_template_is_text_where_text_is_needed() -> None:
    """A template alone keeps its type, which a message need not know."""
    for template, text in {"{{ 3 + 4 }}": "7", "{{ 3 > 4 }}": "false", "it is {{ 4 > 3 }}": "it is true"}.items():
        playbook = playbook_with(f"{{action: test.tell, with: {{message: '{template}'}}}}")
        assert playbook.params("steps", 1, SCOPE).model_dump() == {"message": text}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("steps_back: '{{ labels.word }}'", "steps_back: must be a whole number"),
        ("steps_back: '{{ labels.word == labels.word }}'", "steps_back: must be a number"),
        ("steps_back: '{{ labels.missing }}'", "there is no 'missing' here"),
        ("how: '{{ labels.word }}'", "how: 'x' is not one of fast, safe"),
    ],
)
def test_invalid_rendered_parameters_are_an_error(given: str, told: str) -> None:
    """The error comes before any action."""
    playbook = playbook_with(f"{{action: test.rollback, with: {{{given}}}}}")
    with pytest.raises(errors.ExpressionError) as caught:
        playbook.params("steps", 1, SCOPE)
    assert told in str(caught.value)


def test_a_steps_condition_is_strict() -> None:
    """It is true, false, or an error, never false because a name is missing."""
    playbook = playbook_with("{action: test.rollback, when: labels.n == '7'}")
    assert playbook.when("steps", 1, SCOPE) is True
    assert playbook.when("steps", 0, SCOPE) is True
    with pytest.raises(errors.ExpressionError):
        playbook.when("steps", 1, {"labels": {}})


def test_an_approve_step_asks_its_rendered_message() -> None:
    """Written in short or in long."""
    assert playbook_with("{approve: 'go on with {{ run.id }}?'}").message("steps", 1, SCOPE) == "go on with r1?"
    assert playbook_with("{approve: {message: plain}}").message("steps", 1, SCOPE) == "plain"


def test_the_job_on_a_node_can_be_the_target() -> None:
    """It is used if exactly one job is known to run there."""
    playbook = playbook_of(PLAYBOOK.replace("target: job", "target: {job: 'node:{{ labels.node }}'}"))
    assert playbook.target_of(alert(node="n1"), known_by({"node:n1": "llm"})) == Target(TargetKind.JOB, job="llm")
    assert isinstance(playbook.target_of(alert(node="n2"), known_by({"node:n1": "llm"})), Unresolved)
