"""``node.health``: which answers of an agent are a success, and how long it may take."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.support.clocks import ManualClock
from tests.unit.actions.test_commands import NOW, ScriptedBus, perform
from tests.unit.agent.facts.test_node_facts import _untyped as untyped
from tests.unit.catalog.test_mistakes import problems_of
from trainmedic.wire.envelope import Reply
from trainmedic_agent.health.checks import HealthCheck, HealthReport, HealthVerdict, Level
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions.agent_outputs import NODE_HEALTH
from trainmedic_server.actions.nodes import NodeHealth
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure, TemporaryFailure

NODE = Target(TargetKind.NODE, node="n1")


@pytest.fixture
def bus() -> ScriptedBus:
    return ScriptedBus(ManualClock())


def answer(status: str = "applied", **output: Any) -> tuple[Reply, ...]:
    return (Reply("c1", "n1", status, None, output, NOW),)


@pytest.mark.parametrize("verdict", ["ok", "degraded"])
async def test_a_working_node_is_a_success(bus: ScriptedBus, verdict: str) -> None:
    """The playbook can require more by the verdict."""
    bus.answers = answer(verdict=verdict, faults=[])
    assert (await perform(bus, NodeHealth, target=NODE))["verdict"] == verdict
    assert bus.sent[0].params == {"level": "quick", "gpus": 1}


@pytest.mark.parametrize("verdict", ["failed", "unknown", "new", None])
async def test_any_other_verdict_is_a_failure_with_its_faults(bus: ScriptedBus, verdict: str | None) -> None:
    """The output stays."""
    faults = [f"eth{number}: link_rate: 0; expected: 400" for number in range(6)]
    bus.answers = answer(**({"verdict": verdict} if verdict else {}), faults=faults)
    with pytest.raises(TemporaryFailure, match=r"node 'n1' is not healthy: eth0: link_rate: 0.*; and 2 more") as caught:
        await perform(bus, NodeHealth, target=NODE)
    assert caught.value.output["faults"] == faults


async def test_a_minimum_rate_must_have_been_checked(bus: ScriptedBus) -> None:
    """An older agent ignores the parameter; its verdict does not count."""
    check = {"name": "min_gbps", "part": "mlx5_0/1", "verdict": "ok", "observed": "400 Gb/s", "expected": "100 Gb/s"}
    bus.answers = answer(verdict="ok", faults=[], checks=[check])
    assert (await perform(bus, NodeHealth, {"min_gbps": 100}, target=NODE))["verdict"] == "ok"
    assert bus.sent[0].params == {"level": "quick", "gpus": 1, "min_gbps": 100}
    bus.answers = answer(verdict="ok", faults=[], checks=[])
    with pytest.raises(PermanentFailure, match="the agent of 'n1' did not check min_gbps: update it"):
        await perform(bus, NodeHealth, {"min_gbps": 100}, target=NODE)


async def test_an_answer_without_a_verdict_is_a_failure(bus: ScriptedBus) -> None:
    bus.answers = answer()
    with pytest.raises(TemporaryFailure, match="the agent's answer has no verdict"):
        await perform(bus, NodeHealth, target=NODE)


@pytest.mark.parametrize(
    ("status", "failure"),
    [("rejected", PermanentFailure), ("unsupported", PermanentFailure), ("failed", TemporaryFailure)],
)
async def test_a_refusal_is_a_failure(bus: ScriptedBus, status: str, failure: type[Exception]) -> None:
    """An older agent, which does not know the action, refuses too."""
    bus.answers = answer(status, reason="no")
    with pytest.raises(failure, match="no"):
        await perform(bus, NodeHealth, target=NODE)


@pytest.mark.parametrize(
    ("level", "given", "expected"), [("quick", 60, 2), ("burn", 60, 10), ("quick", 1, 1), ("burn", 5, 5)]
)
async def test_silence_is_unknown_within_the_time_of_the_level(
    bus: ScriptedBus, level: str, given: int, expected: int
) -> None:
    """If the timeout of the step is shorter, it applies."""
    with pytest.raises(OutcomeUnknown):
        await perform(bus, NodeHealth, {"level": level}, target=NODE, deadline=NOW + timedelta(minutes=given))
    assert bus.sent[0].expires_at == NOW + timedelta(minutes=expected)


PLAYBOOK = """
playbook: check
on: {alert: A}
target: node
steps:
  - {id: check, action: node.health, with: {level: burn}, timeout: 10m}
  - action: node.facts
    when: CONDITION
"""


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ('steps.check.output.verdict == "ok"', None),
        ('steps.check.output.checks[0].part == "eth0"', None),
        ("steps.check.output.faults | length > 0", None),
        ('steps.check.output.verdikt == "ok"', "did you mean 'verdict'?"),
        ("steps.check.output.verdict > 1", "text"),
        ('steps.check.output.checks[0].verdikt == "ok"', "did you mean 'verdict'?"),
    ],
)
def test_conditions_on_the_output_are_checked_to_the_leaf(condition: str, said: str | None) -> None:
    """The check takes place when the playbook is loaded."""
    problems = problems_of(PLAYBOOK.replace("CONDITION", condition))
    assert [said in problem for problem in problems] == ([] if said is None else [True])


def test_the_types_are_those_of_an_agents_answer() -> None:
    """A report has every key, and no other."""
    check = HealthCheck("link", "eth0", HealthVerdict.FAILED, "down", "up")
    output = {"node": "n1", **HealthReport(Level.QUICK, NOW, (check,), ("link_rate eth0",)).as_output()}
    assert output.keys() == NODE_HEALTH.keys()
    assert list(untyped(output, NODE_HEALTH)) == []
