"""Jobs that only a log file names: each has findings of its own, and none acts for a job of that name."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec.structs import replace

from tests.support.findings import GPU, of_kernel, of_training, told
from tests.unit.engine.finding_world import FindingWorld
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import CLAIMED_JOB, Finding
from trainmedic_logs.domain.known_finding import FindingEnd, KnownFinding
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.target_resolution import resolve
from trainmedic_server.domain.topology import JobTopology, Topology
from trainmedic_server.engine import finding_claims
from trainmedic_server.engine.finding_claims import ClaimedFindings
from trainmedic_server.engine.finding_intake import MOST_OPEN_OF_NODE
from trainmedic_server.ports.findings import FindingFilter


@pytest.fixture
async def world() -> FindingWorld:
    return await FindingWorld.begun()


async def by_claim(world: FindingWorld) -> dict[str, KnownFinding]:
    return {known.claimed_job: known for known in await world.findings()}


def out_of_memory(world: FindingWorld, job: str, rank: int = 0, node: str = "node-9", **members: object) -> Finding:
    return of_training("cuda-oom", node, job, rank, world.clock.now(), **members)


async def test_three_jobs_of_one_node_are_three_findings_and_alerts(world: FindingWorld) -> None:
    """Ranks of one claimed job are one finding; another job's lines are another."""
    for job, ranks in (("bert-5", 2), ("gpt-6", 1), ("t5-7", 3)):
        await world.tell(*(out_of_memory(world, job, rank) for rank in range(ranks)))
    known = await by_claim(world)
    assert {job: (each.count, each.ranks) for job, each in known.items()} == {
        "bert-5": (2, frozenset({0, 1})),
        "gpt-6": (1, frozenset({0})),
        "t5-7": (3, frozenset({0, 1, 2})),
    }
    assert {each.target for each in known.values()} == {Target(TargetKind.NODE, "node-9")}
    alerts = {alert.labels["claimed_job"]: alert for alert in world.taker.told}
    assert alerts.keys() == known.keys()
    assert len({alert.fingerprint for alert in alerts.values()}) == 3
    assert "from a log file that names job gpt-6; nothing proves" in alerts["gpt-6"].annotations["summary"]


async def test_a_claimed_name_names_no_target(world: FindingWorld) -> None:
    """A job of that name runs elsewhere. By the alert nobody finds it, nor the node, and people are told."""
    world.topology = Topology(jobs=JobTopology(jobs_by_node={"node-1": frozenset({"llm-1"})}))
    await world.tell(out_of_memory(world, "llm-1"))
    [alert] = world.taker.told
    assert alert.labels[CLAIMED_JOB] == "llm-1"
    assert alert.labels["needs"] == "people"
    for kind in (TargetKind.JOB, TargetKind.NODE, TargetKind.GPU):
        assert isinstance(resolve(kind, alert.labels, world.topology), Unresolved)
    page, _ = await world.store.findings_page(FindingFilter(job="llm-1"), 10, None)
    assert page == []


async def test_no_agent_and_no_rule_sets_the_label_itself(world: FindingWorld) -> None:
    """A label of that name in an update is dropped, also for a job that is known."""
    forged = {CLAIMED_JOB: "llm-2"}
    await world.tell(
        of_training("cuda-oom", "node-1", "llm-1", 0, world.clock.now(), labels=forged),
        of_kernel("gpu-xid", "node-1", world.clock.now(), GPU, labels=forged),
    )
    assert [CLAIMED_JOB in known.labels for known in await world.findings()] == [False, False]


async def test_a_kernel_claims_nothing(world: FindingWorld) -> None:
    """Whatever job an agent writes beside its lines."""
    finding = of_kernel("nfs-away", "node-9", world.clock.now())
    await world.tell(replace(finding, origin=replace(finding.origin, job="llm-1")))
    assert (await world.only()).claimed_job == ""


async def test_each_claimed_job_ends_by_itself(world: FindingWorld) -> None:
    """One goes on printing; the other is silent for as long as its rule says."""
    await world.tell(out_of_memory(world, "bert-5"), out_of_memory(world, "gpt-6"))
    for count in range(2, 6):
        await world.pass_by(minutes=6)
        await world.tell(told(out_of_memory(world, "gpt-6", count=count)))
    known = await by_claim(world)
    assert known["bert-5"].ended_because is FindingEnd.SILENCE
    assert known["gpt-6"].is_open


async def test_an_update_of_a_claim_that_comes_twice_changes_nothing(world: FindingWorld) -> None:
    """Also to another process of the server."""
    update = told(out_of_memory(world, "gpt-6", count=4))
    await world.tell(update, update)
    world.begin()
    await world.tell(update)
    assert (await world.only()).count == 4


@pytest.mark.parametrize(
    ("suspected", "other", "is_confirmed"),
    [("bert-5", "bert-5", True), ("bert-5", "gpt-6", False), ("llm-1", "gpt-6", False), ("bert-5", "llm-1", False)],
)
async def test_a_claim_confirms_its_own_job_alone(
    world: FindingWorld, suspected: str, other: str, is_confirmed: bool
) -> None:
    """On one node; llm-1 is known to be there, the others are claims."""
    at = world.clock.now()
    finding = of_training("gpu-xid", "node-1", other, 0, at)
    await world.tell(of_training("loader", "node-1", suspected, 0, at), finding)
    await world.pass_by(seconds=5)
    [first] = [known for known in await world.findings() if known.rule == "loader"]
    assert (first.claimed_job or first.target.job) == suspected
    assert (first.confirmed_by == "gpu-xid") == is_confirmed


async def test_the_kernel_of_the_node_confirms_a_claim(world: FindingWorld) -> None:
    """Its lines are about the node, whichever job is there."""
    at = world.clock.now()
    await world.tell(of_training("loader", "node-9", "gpt-6", 0, at), of_kernel("gpu-xid", "node-9", at, GPU))
    await world.pass_by(seconds=5)
    assert (await by_claim(world))["gpt-6"].confirmed_by == "gpu-xid"


async def test_invented_names_leave_room_for_the_kernel(world: FindingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the bound on the lines are the node's; that is counted, and nothing is lost."""
    monkeypatch.setattr(finding_claims, "MOST_CLAIMED_OF_NODE", 20)
    at = world.clock.now()
    for number in range(30):
        await world.intake.take([told(out_of_memory(world, f"invented-{number}", count=1))])
    known = await by_claim(world)
    assert len(known) == 21
    assert known[""].count == 10
    assert world.metrics.registry.get_sample_value("trainmedic_finding_claims_cut_total") == 10
    await world.tell(of_kernel("gpu-xid", "node-9", at, GPU), out_of_memory(world, "gpt-6", node="node-8"))
    assert len(await world.findings()) == 23
    assert finding_claims.MOST_CLAIMED_OF_NODE < MOST_OPEN_OF_NODE / 2


async def test_a_restart_goes_on_with_the_findings_that_are_open(world: FindingWorld) -> None:
    """They count, and their claims are still admitted."""
    await world.tell(out_of_memory(world, "gpt-6"))
    world.begin()
    await world.pass_by(seconds=5)
    await world.tell(told(out_of_memory(world, "gpt-6", rank=1)))
    assert (await world.only()).ranks == frozenset({0, 1})


async def test_claims_are_counted_for_a_day() -> None:
    """Of each node alone."""
    claims, now = ClaimedFindings(), (await FindingWorld.begun()).clock.now()
    most = finding_claims.MOST_CLAIMED_OF_NODE
    assert all(claims.try_add("node-1", str(number), now) for number in range(most))
    assert not claims.try_add("node-1", "one more", now)
    assert claims.try_add("node-1", "0", now)
    assert claims.try_add("node-2", "one more", now)
    later = now + timedelta(days=1, seconds=1)
    assert claims.try_add("node-1", "one more", later)


async def test_a_name_with_hidden_characters_is_shown_by_their_numbers(world: FindingWorld) -> None:
    """It ends in messages, and steers no terminal there."""
    await world.tell(out_of_memory(world, "gpt\x1b[2J\n6"))
    assert (await world.only()).claimed_job == r"gpt\x1b[2J\n6"
