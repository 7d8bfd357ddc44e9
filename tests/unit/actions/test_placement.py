"""Node actions on a job: what is sent to each place, and how the answers of all are judged."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.clocks import ManualClock
from tests.unit.actions.test_commands import NoHttp, ScriptedBus
from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command, Reply
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import nodes, placement, registry
from trainmedic_server.actions.nodes import GpuPowerLimit, NodeFacts
from trainmedic_server.catalog import loader
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.errors import (
    ActionFailure,
    OutcomeUnknown,
    PermanentFailure,
    PlaybookError,
    TemporaryFailure,
)
from trainmedic_server.ports.actions import Call, LeasedEffect, Services
from trainmedic_server.ports.outside import Presence

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
JOB = Target(TargetKind.JOB, job="llm-1")
ATTEMPT = envelope.new_id(int(NOW.timestamp() * 1000))
CAP = envelope.new_id(int(NOW.timestamp() * 1000))

Answer = Callable[[Command], Reply | None]


class AgentsBus(ScriptedBus):
    """A command bus with agents that answer by a rule of the test's; None is silence."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.answer: Answer = lambda command: reply(command, limit_watts=300.0)
        self.agents_present: list[Presence] = []

    async def request(
        self, command: Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[Reply, ...]:
        self.sent.append(command)
        answer = self.answer(command)
        if answer is None and unheard is not None:
            await unheard()
        return (answer,) if answer is not None else ()

    async def agents(self) -> list[Presence]:
        return self.agents_present


def reply(command: Command, status: str = "applied", **output: Any) -> Reply:
    return Reply(command.id, "agent", status, None, output, NOW)


@pytest.fixture
def bus() -> AgentsBus:
    return AgentsBus()


def made(bus: AgentsBus, kind: type[Any]) -> Any:
    return kind(Services(clock=bus.clock, bus=bus, http=NoHttp()))


def call(kind: type[Any], params: Mapping[str, Any], **changes: Any) -> Call:
    fields: dict[str, Any] = {
        "command_id": ATTEMPT,
        "run_id": "r1",
        "playbook": "cool-job",
        "target": JOB,
        "params": kind.Params.model_validate(params),
        "reason": "Hot",
        "issued_at": NOW,
        "deadline": NOW + timedelta(seconds=60),
        "alert": Alert("f1", AlertStatus.FIRING, {"alertname": "Hot"}, {}, NOW),
    }
    return Call(**{**fields, **changes})


def placed(*entries: tuple[int, str, str | None], ranks: Sequence[int] | None = None) -> list[Presence]:
    """The presence of the job with its ranks in these places."""
    said = [{"rank": rank, "node": node, "gpu": gpu} for rank, node, gpu in entries]
    return [Presence("llm-1", NOW, {"ranks": list(ranks or [rank for rank, *_ in entries]), "placement": said})]


TWO_NODES = placed((0, "n2", "GPU-c"), (1, "n1", "GPU-b"), (2, "n1", "GPU-a"))
ON_TWO = {"n1": ["GPU-a", "GPU-b"], "n2": ["GPU-c"]}


async def test_the_location_of_a_job_is_looked_up_once(bus: AgentsBus) -> None:
    """Its GPUs are listed by node; a known location is not requested again, though the job may have moved."""
    bus.present = TWO_NODES
    located = await made(bus, GpuPowerLimit).locate(call(GpuPowerLimit, {"percent": 80}))
    assert located.model_dump(mode="json", exclude_none=True) == {"percent": 80, "nodes": ON_TWO}
    bus.present = placed((0, "n9", "GPU-z"))
    again = await made(bus, GpuPowerLimit).locate(call(GpuPowerLimit, {"percent": 80, "nodes": ON_TWO}))
    assert again.model_dump(mode="json")["nodes"] == ON_TWO
    assert bus.sent == []


async def test_a_target_other_than_a_job_needs_no_lookup(bus: AgentsBus) -> None:
    """The target itself states where a GPU is."""
    bus.is_away = True
    on_gpu = call(GpuPowerLimit, {"percent": 80}, target=Target(TargetKind.GPU, node="n1", gpu="0"))
    assert await made(bus, GpuPowerLimit).locate(on_gpu) is on_gpu.params


@pytest.mark.parametrize(
    ("present", "failure", "why"),
    [
        ([], TemporaryFailure, "job 'llm-1' is not connected; its location is unknown"),
        ([Presence("llm-1", NOW, {"ranks": [0]})], PermanentFailure, "has no placement"),
        (
            [Presence("llm-1", NOW, {"placement": ["?", {"rank": 0, "node": 7}]})],
            PermanentFailure,
            "no placement",
        ),
        (placed((0, "n1", "GPU-a"), ranks=[0, 1, 2]), PermanentFailure, "does not report the location of ranks 1, 2"),
        (
            [Presence("llm-1", NOW, {"placement": [{"rank": [0], "node": "n1", "gpu": "GPU-a"}], "ranks": [0, [0]]})],
            PermanentFailure,
            "does not report the location of rank 0",
        ),
        (placed((0, "n1", "GPU-a"), (1, "n1", None)), PermanentFailure, "rank 1 of job 'llm-1' names no GPU"),
        (placed((0, "n1", None), (1, "n1", None)), PermanentFailure, "ranks 0, 1 of job 'llm-1' name no GPU"),
    ],
)
async def test_a_job_that_does_not_state_all_its_locations_is_rejected(
    bus: AgentsBus, present: list[Presence], failure: type[ActionFailure], why: str
) -> None:
    """Capping only some GPUs of a job would make it wait for those, so all are capped or none."""
    bus.present = present
    with pytest.raises(failure, match=why):
        await made(bus, GpuPowerLimit).locate(call(GpuPowerLimit, {"percent": 80}))


async def test_a_job_that_never_connected_is_rejected_with_the_nearest_name(bus: AgentsBus) -> None:
    """A job that was connected recently may be restarting, so that failure is temporary."""
    bus.present = [Presence("llm-12", NOW, {}), Presence("vision", NOW, {})]
    services = Services(clock=bus.clock, bus=bus, http=NoHttp(), may_connect=lambda job: job == "llm-7")
    action = GpuPowerLimit(services)
    with pytest.raises(PermanentFailure, match=r"no job named 'llm-1' .* in the last day; did you mean 'llm-12'\?"):
        await action.locate(call(GpuPowerLimit, {"percent": 80}))
    restarting = call(GpuPowerLimit, {"percent": 80}, target=Target(TargetKind.JOB, job="llm-7"))
    with pytest.raises(TemporaryFailure, match="not connected"):
        await action.locate(restarting)


async def test_facts_are_also_read_on_nodes_without_gpus(bus: AgentsBus) -> None:
    """A rank that names no GPU still has a node."""
    bus.present = placed((0, "n1", None), (1, "n2", None))
    located = await made(bus, NodeFacts).locate(call(NodeFacts, {}))
    assert list(located.nodes) == ["n1", "n2"]


async def test_each_gpu_of_the_job_gets_its_own_command(bus: AgentsBus) -> None:
    """The commands differ by id only, go to the agent of each node, and keep their ids when sent again."""
    action = made(bus, GpuPowerLimit)
    output = await action.perform(call(GpuPowerLimit, {"percent": 80, "nodes": ON_TWO}))
    assert [dict(command.target) for command in bus.sent] == [
        {"kind": "gpu", "node": "n1", "gpu": "GPU-a"},
        {"kind": "gpu", "node": "n1", "gpu": "GPU-b"},
        {"kind": "gpu", "node": "n2", "gpu": "GPU-c"},
    ]
    assert [dict(command.params) for command in bus.sent] == [{"percent": 80, "lease_seconds": 300}] * 3
    assert output["nodes"] == 2
    assert output["by_node"]["n1"]["GPU-b"] == {"limit_watts": 300.0}
    first = [command.id for command in bus.sent]
    await action.perform(call(GpuPowerLimit, {"percent": 80, "nodes": ON_TWO}, resumed=True))
    assert [command.id for command in bus.sent] == [*first, *first]
    action.outcome_saved(ATTEMPT)
    assert sorted(bus.settled) == sorted(first)


async def test_the_undo_names_each_command_that_it_reverts(bus: AgentsBus) -> None:
    """The undo goes to the same agents as the cap, and requests no lease."""
    action = made(bus, GpuPowerLimit)
    await action.perform(call(GpuPowerLimit, {"percent": 80, "nodes": ON_TWO}, command_id=CAP))
    capped = [command.id for command in bus.sent]
    bus.sent.clear()
    inverse = GpuPowerLimit.inverse(GpuPowerLimit.Params.model_validate({"percent": 80, "nodes": ON_TWO}), None)
    assert inverse is not None
    await action.perform(call(GpuPowerLimit, inverse.params, undo_of=CAP))
    assert [command.undo_of for command in bus.sent] == capped
    assert {tuple(command.params.items()) for command in bus.sent} == {(("restore", True),)}


async def test_the_undo_of_a_cap_that_was_never_sent_does_nothing(bus: AgentsBus) -> None:
    """The server was killed before it had located the job."""
    inverse = GpuPowerLimit.inverse(GpuPowerLimit.Params.model_validate({"percent": 80}), None)
    assert inverse is not None
    await made(bus, GpuPowerLimit).perform(call(GpuPowerLimit, inverse.params, undo_of=CAP))
    assert bus.sent == []


def test_a_derived_id_is_a_uuid_with_the_attempts_timestamp() -> None:
    """The id sorts with that of the attempt, and differs for each location."""
    made = [placement.command_id_for(ATTEMPT, Target(TargetKind.GPU, node="n1", gpu=str(gpu))) for gpu in range(100)]
    assert len(set(made)) == 100
    for one in map(uuid.UUID, made):
        assert (one.version, one.variant) == (7, uuid.RFC_4122)
        assert one.int >> 80 == uuid.UUID(ATTEMPT).int >> 80


def answers(**by_gpu: str) -> Answer:
    """What each GPU's command is answered; ``silent`` for not at all."""

    def answer(command: Command) -> Reply | None:
        status = by_gpu[str(command.target["gpu"])[-1]]
        return None if status == "silent" else reply(command, status, reason=f"because of {command.target['gpu']}")

    return answer


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        ({"a": "failed", "b": "failed", "c": "failed"}, TemporaryFailure),
        ({"a": "failed", "b": "rejected", "c": "failed"}, PermanentFailure),
        ({"a": "applied", "b": "failed", "c": "applied"}, OutcomeUnknown),
        ({"a": "applied", "b": "rejected", "c": "applied"}, OutcomeUnknown),
        ({"a": "applied", "b": "applied", "c": "silent"}, OutcomeUnknown),
        ({"a": "failed", "b": "failed", "c": "silent"}, OutcomeUnknown),
    ],
)
async def test_all_answers_are_evaluated_together(
    bus: AgentsBus, answered: dict[str, str], expected: type[ActionFailure]
) -> None:
    """The command is done everywhere, nowhere or possibly; the failure states where and why."""
    bus.answer = answers(**answered)
    with pytest.raises(expected) as failure:
        await made(bus, GpuPowerLimit).perform(call(GpuPowerLimit, {"percent": 80, "nodes": ON_TWO}))
    bad = next(gpu for gpu, status in answered.items() if status != "applied")
    if answered[bad] != "silent":
        assert f"because of GPU-{bad}" in str(failure.value)
    applied = list(answered.values()).count("applied")
    assert (f"applied in {applied} of 3 places" in str(failure.value)) == bool(applied)


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        ({"a": "applied", "b": "failed", "c": "applied"}, TemporaryFailure),
        ({"a": "applied", "b": "rejected", "c": "failed"}, TemporaryFailure),
        ({"a": "rejected", "b": "rejected", "c": "rejected"}, PermanentFailure),
        ({"a": "applied", "b": "failed", "c": "silent"}, OutcomeUnknown),
    ],
)
async def test_an_undo_that_failed_on_some_nodes_is_retried_under_new_ids(
    bus: AgentsBus, answered: dict[str, str], expected: type[ActionFailure]
) -> None:
    """An agent that has answered a command with failed ignores its repetition, but not a new command."""
    bus.answer = answers(**answered)
    with pytest.raises(expected):
        await made(bus, GpuPowerLimit).perform(call(GpuPowerLimit, {"restore": True, "nodes": ON_TWO}, undo_of=CAP))


async def test_facts_of_several_nodes_are_merged_to_the_highest_and_lowest(bus: AgentsBus) -> None:
    """A condition then reads alike for a node and a job; differing non-numeric values are listed by node only."""
    said = {
        "n1": {"cpu": {"percent": 91.5, "cores": 64}, "memory": {"percent": 40}, "host": "a", "swap": None},
        "n2": {"cpu": {"percent": 12.0, "cores": 64}, "memory": {"percent": 88}, "host": "b", "swap": 3},
    }
    bus.answer = lambda command: reply(command, **said[str(command.target["node"])])
    output = await made(bus, NodeFacts).perform(call(NodeFacts, {"nodes": {"n1": [], "n2": []}}))
    assert output == {
        "cpu": {"percent": 91.5, "cores": 64},
        "memory": {"percent": 88},
        "swap": 3,
        "lowest": {"cpu": {"percent": 12.0, "cores": 64}, "memory": {"percent": 40}, "swap": 3},
        "nodes": 2,
        "by_node": said,
    }


async def test_facts_of_the_reachable_nodes_are_in_the_output_of_a_step_that_continues(bus: AgentsBus) -> None:
    """One node with an unavailable agent does not prevent the others from being read."""
    bus.answer = lambda command: reply(command, cpu=50) if command.target["node"] == "n1" else None
    with pytest.raises(OutcomeUnknown, match="no agent on node 'n2' is connected") as failure:
        await made(bus, NodeFacts).perform(call(NodeFacts, {"nodes": {"n1": [], "n2": []}}))
    assert failure.value.output["cpu"] == 50


def test_a_playbook_cannot_state_where_a_job_runs() -> None:
    """Only the job states its location."""
    text = """
playbook: cool-job
on: {alert: Hot}
target: job
steps:
  - {action: gpu.power_limit, with: {percent: 80, nodes: {n1: [GPU-a]}}}
"""
    with pytest.raises(PlaybookError, match="nodes is set by the server"):
        loader.load_one(text, "test.yaml", registry.specs_only())


# --- renewing ---------------------------------------------------------------------------------------


def hold(command_id: str, target: Target, **params: Any) -> LeasedEffect:
    return LeasedEffect(command_id, "r1", "cap", target, params, True)


async def test_holds_are_renewed_with_one_command_per_node(bus: AgentsBus) -> None:
    """Holds of jobs are renewed under the ids of their commands there; a restore holds nothing."""
    bus.answer = lambda command: reply(command, renewed=command.params["holds"], unknown=[])
    holds = [
        hold("c1", Target(TargetKind.GPU, node="n1", gpu="0"), percent=80),
        hold("c2", Target(TargetKind.GPU, node="n2", gpu="0"), percent=80),
        hold("c3", Target(TargetKind.GPU, node="n2", gpu="1"), restore=True),
        hold(CAP, JOB, percent=80, nodes=ON_TWO),
    ]
    renewals = await made(bus, GpuPowerLimit).renew(holds, NOW + timedelta(seconds=100))
    assert {renewal.outcome for renewal in renewals} == {"renewed"}
    first, second = bus.sent
    assert (first.action, dict(first.target)) == (nodes.RENEW, {"kind": "node", "node": "n1"})
    of_job = [placement.command_id_for(CAP, place) for place in GpuPowerLimit.places({"nodes": ON_TWO})]
    assert first.params == {"holds": ["c1", *of_job[:2]], "lease_seconds": 300}
    assert second.params == {"holds": ["c2", of_job[2]], "lease_seconds": 300}
    assert (first.issued_at, first.expires_at) == (NOW, NOW + timedelta(seconds=100))
    assert sorted(bus.settled) == sorted(command.id for command in bus.sent)
    assert Command.decode(first.encode()) == first


async def test_the_outcome_of_each_hold_is_reported(bus: AgentsBus) -> None:
    """A hold may be unknown, refused by the agent's policy, or not answered at all."""

    def answer(command: Command) -> Reply | None:
        match command.target["node"]:
            case "n1":
                return reply(command, renewed=["c1"], unknown=["c2"], ended={"c2": "the lease ran out"})
            case "n2":
                return reply(command, "rejected", reason="the policy does not allow it")
        return None

    bus.answer = answer
    where = {"c1": "n1", "c2": "n1", "c3": "n2", "c4": "n3"}
    holds = [hold(name, Target(TargetKind.GPU, node=node, gpu="0"), watts=300) for name, node in where.items()]
    renewals = await made(bus, GpuPowerLimit).renew(holds, NOW)
    outcomes = {renewal.effect.command_id: (renewal.node, renewal.outcome) for renewal in renewals}
    assert outcomes == {
        "c1": ("n1", "renewed"),
        "c2": ("n1", "lost"),
        "c3": ("n2", "refused"),
        "c4": ("n3", "unanswered"),
    }
    assert renewals[1].why == "the agent on n1 no longer holds it: the lease ran out"
    assert "the policy does not allow it" in renewals[2].why


@pytest.mark.parametrize(
    ("output", "seconds"),
    [
        ({}, 300),
        ({"lease_seconds": 60}, 60),
        ({"lease_seconds": 900}, 300),
        ({"lease_seconds": "?"}, 300),
        ({"lease_seconds": 300, "lowest": {"lease_seconds": 120}}, 120),
    ],
)
def test_an_agent_may_grant_a_shorter_lease(output: dict[str, Any], seconds: int) -> None:
    """Of several leases, the shortest counts; an unreadable one counts as the lease requested."""
    assert GpuPowerLimit.granted(output) == timedelta(seconds=seconds)
