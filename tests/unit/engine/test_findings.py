"""Findings: what is one, whom it is about, and how many of them one node may have."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import permutations

import pytest
from msgspec.structs import replace

from tests.support.findings import GPU, RULES, of_kernel, of_training, told
from tests.unit.engine.finding_world import FindingWorld
from trainmedic_core.fingerprint import fingerprint
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.known_finding import JobPlace
from trainmedic_server.domain.alert import AlertStatus
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.topology import ClusterTopology, Pod, Topology
from trainmedic_server.engine import finding_alerts, node_watch
from trainmedic_server.engine.finding_intake import MOST_EXCERPTS, MOST_OPEN_OF_NODE
from trainmedic_server.engine.node_watch import REMEMBERED
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.findings import FindingFilter
from trainmedic_server.ports.outside import Presence


@pytest.fixture
async def world() -> FindingWorld:
    return await FindingWorld.begun()


async def test_512_victims_are_one_finding_and_one_alert(world: FindingWorld) -> None:
    """Never the rank makes a finding: the alert says which ranks, and how often."""
    at = world.clock.now()
    for rank in range(512):
        node = "node-1" if rank % 2 else "node-2"
        await world.intake.take([told(of_training("cuda-oom", node, "llm-1", rank, at, count=2))])
    await world.tell_alerts()
    known = await world.only()
    assert (known.count, known.ranks, known.nodes) == (1024, frozenset(range(512)), {"node-1", "node-2"})
    [alert] = world.taker.told
    assert alert.annotations["ranks"] == "0-511"
    assert alert.annotations["count"] == "1024"
    assert alert.labels == {
        "alertname": "TrainingOutOfMemory",
        "severity": "warning",
        "component": "training",
        "source": "log",
        "rule": "cuda-oom",
        "job_name": "llm-1",
    }
    assert alert.fingerprint == fingerprint(dict(alert.labels))


async def test_what_a_later_attempt_shows_again_is_a_finding_of_its_own(world: FindingWorld) -> None:
    """Each is of its attempt alone; the alert goes on, so nobody hears that it ended. What an earlier attempt's stream
    says late is still that one's."""
    first = of_training("cuda-oom", "node-1", "llm-1", 0, world.clock.now(), line="first")
    await world.tell(first)
    await world.pass_by(seconds=20)
    origin = replace(first.origin, attempt=2, stream="/logs/llm-1/attempt-2/rank-0")
    now = world.clock.now()
    await world.tell(replace(first, id="again", origin=origin, line="second", first_at=now, last_at=now))
    await world.tell(replace(first, count=3))
    shown = [(each.origin.attempt, each.line, each.count, each.is_open) for each in await world.findings()]
    assert shown == [(1, "first", 3, False), (2, "second", 1, True)]
    assert {alert.status for alert in world.taker.told} == {AlertStatus.FIRING}
    assert len({(alert.fingerprint, alert.starts_at) for alert in world.taker.told}) == 1
    await world.store.transact(
        lambda tx: tx.save_job_lives([JobLife("llm-1", LifeState.ENDED, now + timedelta(hours=1))])
    )
    await world.pass_by(hours=1)
    assert [alert.status for alert in world.taker.told][-1:] == [AlertStatus.RESOLVED]


async def test_a_stream_that_proves_the_cause_adds_its_proof(world: FindingWorld) -> None:
    """A rank's record of an exception has no frames, which its output has. Another exception's proof says nothing."""
    now = world.clock.now()
    record = of_training("python-exception", "node-1", "llm-1", 0, now, line="KeyError: 'mask'")
    printed = replace(record, id="printed", fields={"proof": "program"})
    other = replace(printed, id="other", line="ValueError: no such axis")
    await world.tell(record, other)
    assert "proof" not in (await world.only()).fields
    await world.tell(printed, record)
    assert (await world.only()).fields["proof"] == "program"


async def test_an_update_that_comes_twice_late_or_in_another_order_changes_nothing(world: FindingWorld) -> None:
    """Each says all that its stream knows."""
    at = world.clock.now()
    first = of_training("cuda-oom", "node-1", "llm-1", 0, at)
    updates = [
        told(first),
        told(replace(first, count=5, last_at=at + timedelta(seconds=3))),
        told(of_training("cuda-oom", "node-2", "llm-1", 1, at + timedelta(seconds=1), count=3)),
    ]
    outcomes = []
    for order in permutations(updates):
        fresh = FindingWorld()
        await fresh.nodes.look()
        await fresh.tell(*order, *order)
        known = await fresh.only()
        outcomes.append((known.count, known.ranks, known.first_at, known.last_at, known.nodes))
    assert set(outcomes) == {(8, frozenset({0, 1}), at, at + timedelta(seconds=3), frozenset({"node-1", "node-2"}))}


async def test_other_targets_and_labels_are_other_findings(world: FindingWorld) -> None:
    """Of the same rule."""
    at = world.clock.now()
    one = of_kernel("gpu-xid", "node-1", at, GPU, labels={"xid": "79"}, fields={"xid": "79"})
    await world.tell(
        one,
        replace(one, id="2", labels={"xid": "48"}),
        replace(one, id="3", target=replace(one.target, gpu="GPU-0")),
        replace(of_kernel("gpu-xid", "node-2", at, GPU, labels={"xid": "79"})),
    )
    assert len(await world.findings()) == 4
    assert len({alert.fingerprint for alert in world.taker.told}) == 4


async def test_an_alert_of_a_gpu_names_the_gpu_and_its_node(world: FindingWorld) -> None:
    """By the labels by which playbooks find them; what the rule adds cannot name another."""
    labels = {"xid": "79", "node": "node-9", "made_up": "x"}
    await world.tell(of_kernel("gpu-xid", "node-2", world.clock.now(), GPU, labels=labels, fields={"xid": "79"}))
    [alert] = world.taker.told
    assert alert.labels == {
        "alertname": "GPUXidLogged",
        "severity": "critical",
        "component": "gpu",
        "source": "log",
        "rule": "gpu-xid",
        "node": "node-2",
        "UUID": GPU,
        "xid": "79",
    }
    assert alert.annotations["summary"] == f"GPU {GPU} on node-2 reported XID 79"
    assert alert.annotations["finding"] == (await world.only()).id
    assert alert.annotations["line"] == "a line of gpu-xid"


# --- whom it is about ---------------------------------------------------------------------------


async def test_a_node_speaks_for_itself_alone(world: FindingWorld) -> None:
    """Whatever its agent says of another node's GPU."""
    finding = of_kernel("gpu-xid", "node-2", world.clock.now(), GPU)
    await world.tell(replace(finding, target=Target(TargetKind.GPU, "node-1", GPU)))
    assert (await world.only()).target == Target(TargetKind.GPU, "node-2", GPU)


async def test_a_job_that_is_not_there_is_not_believed(world: FindingWorld) -> None:
    """The finding is the node's, and no playbook finds the node by its alert: people are told."""
    await world.tell(of_training("cuda-oom", "node-9", "llm-1", 0, world.clock.now()))
    known = await world.only()
    assert known.target == Target(TargetKind.NODE, "node-9")
    assert known.origin.job is None
    [alert] = world.taker.told
    assert alert.labels["needs"] == "people"
    assert alert.labels["seen_on"] == "node-9"
    assert {"node", "job_name", "UUID"}.isdisjoint(alert.labels)


@pytest.mark.parametrize("is_printed_first", [True, False])
async def test_what_is_printed_is_not_taken_for_the_kernels(world: FindingWorld, is_printed_first: bool) -> None:
    """A line like the kernel's in a log of a job that is not known to be there is a finding of its own, whichever is
    first, and none of the kernel's has its lines."""
    of_log = of_training("nfs-away", "node-9", "llm-1", 0, world.clock.now(), line="as printed")
    both = [told(of_log, lines=["as printed"]), told(of_kernel("nfs-away", "node-9", world.clock.now()), lines=["own"])]
    await world.tell(*(both if is_printed_first else both[::-1]))
    known = {each.is_printed: each for each in await world.findings()}
    assert known.keys() == {True, False}
    assert {known[True].target, known[False].target} == {Target(TargetKind.NODE, "node-9")}
    record = await world.store.finding(known[False].id)
    assert [each.excerpt.lines for each in (record.excerpts if record else ())] == [("own",)]
    assert {("node" in alert.labels, "seen_on" in alert.labels) for alert in world.taker.told} == {
        (False, True),
        (True, False),
    }
    assert len({alert.fingerprint for alert in world.taker.told}) == 2


async def test_a_job_is_believed_for_an_hour_after_it_was_there(world: FindingWorld) -> None:
    """Also by a server that has just started: a job that dies takes its presence with it."""
    del world.presences.job_details["llm-1"]
    world.presences.launchers_on["llm-2"] = "node-3"
    await world.pass_by(minutes=10)
    del world.presences.launchers_on["llm-2"]
    world.begin()
    await world.nodes.start()
    at = world.clock.now()
    await world.tell(
        of_training("cuda-oom", "node-1", "llm-1", 0, at), of_training("cuda-oom", "node-3", "llm-2", 0, at)
    )
    assert [known.target.job for known in await world.findings()] == ["llm-1", "llm-2"]
    await world.pass_by(minutes=61)
    late = of_training("cuda-oom", "node-3", "llm-2", 1, world.clock.now())
    await world.tell(late)
    assert (await world.findings())[-1].target == Target(TargetKind.NODE, "node-3")


@pytest.mark.parametrize("ago", [timedelta(days=3), timedelta(minutes=5)])
async def test_more_places_in_the_store_than_are_remembered_keep_nobody_from_looking(
    world: FindingWorld, monkeypatch: pytest.MonkeyPatch, ago: timedelta
) -> None:
    """The store keeps them for as long as the history. Those of the last hour alone take the place of new ones."""
    monkeypatch.setattr(node_watch, "MOST_PLACES", 3)  # two are known from the beginning
    seen_at = world.clock.now() - ago
    await world.store.transact(
        lambda tx: tx.findings.save_job_places({JobPlace("llm-0", f"node-{number}"): seen_at for number in range(3)})
    )
    world.begin()
    await world.nodes.start()
    world.presences.job_details = {"llm-9": {"placement": [{"rank": 0, "node": "node-1"}]}}
    await world.nodes.look()
    assert world.nodes.progress.keys() == {"llm-9"}
    assert world.nodes.was_there("llm-9", "node-1") == (ago > REMEMBERED)
    await world.pass_by(minutes=61)
    await world.pass_by(seconds=5)
    assert world.nodes.was_there("llm-9", "node-1")


async def test_the_job_of_a_pod_is_believed(world: FindingWorld) -> None:
    """By the pod in whose log the line stands."""
    pod = Pod("u1", "team", "llm-7-0", "node-5", "llm-7")
    world.topology = Topology(cluster=ClusterTopology(pods={"u1": pod}))
    finding = of_training("cuda-oom", "node-5", "", 0, world.clock.now())
    origin = replace(finding.origin, job=None, pod="team/llm-7-0")
    await world.tell(replace(finding, origin=origin, target=Target(TargetKind.NODE, "node-5")))
    assert (await world.only()).target == Target(TargetKind.JOB, job="llm-7")


# --- bounds -------------------------------------------------------------------------------------


async def test_a_node_can_begin_so_many_findings(world: FindingWorld) -> None:
    """What is beyond is dropped and counted; other nodes are not held up."""
    at = world.clock.now()
    many = [of_kernel("gpu-xid", "node-1", at, f"GPU-{number}", id=f"{number}") for number in range(600)]
    await world.intake.take([told(finding) for finding in many[:300]])
    await world.intake.take([told(finding) for finding in many[300:]])
    await world.intake.take([told(of_kernel("gpu-xid", "node-2", at, GPU))])
    page, _ = await world.store.findings_page(FindingFilter(node="node-1"), 1000, None)
    assert len(page) == MOST_OPEN_OF_NODE
    assert world.metrics.registry.get_sample_value("trainmedic_findings_dropped_total") == 100
    assert len(await world.findings()) == MOST_OPEN_OF_NODE + 1


async def test_lines_of_one_job_hide_no_report_of_another(world: FindingWorld) -> None:
    """Whoever prints chooses labels, and so how many findings there are. The kernel's and other jobs' are kept."""
    at = world.clock.now()
    one = of_training("gpu-xid", "node-1", "unknown-job", 0, at)
    await world.intake.take([told(replace(one, id=f"{number}", labels={"xid": f"{number}"})) for number in range(600)])
    assert len(await world.findings()) == MOST_OPEN_OF_NODE
    await world.tell(of_kernel("gpu-xid", "node-1", at, GPU))
    await world.tell(of_training("cuda-oom", "node-1", "llm-1", 0, at))
    kept = {known.target.key for known in await world.findings()}
    assert {f"gpu:node-1/{GPU}", "job:llm-1"} <= kept


async def test_of_many_excerpts_the_first_are_kept(world: FindingWorld) -> None:
    """512 ranks that print the same need no 512 excerpts."""
    at = world.clock.now()
    for rank in range(20):
        await world.intake.take([told(of_training("cuda-oom", "node-1", "llm-1", rank, at), lines=[f"rank {rank}"])])
    record = await world.store.finding((await world.only()).id)
    assert record is not None
    assert {excerpt.rank for excerpt in record.excerpts} == set(range(MOST_EXCERPTS))


async def test_updates_that_were_lost_are_counted(world: FindingWorld) -> None:
    """By the numbers that an agent gives them."""
    finding = of_kernel("nfs-away", "node-1", world.clock.now())
    await world.tell(told(finding, 4), told(finding, 5), told(finding, 9), told(finding, 9))
    assert world.metrics.registry.get_sample_value("trainmedic_finding_updates_lost_total") == 3


async def test_what_the_presences_say_is_forgotten_with_redis(world: FindingWorld) -> None:
    """While Redis is away nothing is read, and nothing ends because of it."""

    async def away() -> list[Presence]:
        raise BusUnavailable("away")

    world.presences.jobs = away  # type: ignore[method-assign]
    with pytest.raises(BusUnavailable):
        await world.nodes.look()
    assert world.nodes.was_there("llm-1", "node-1")


def test_labels_that_name_a_target_are_not_the_rules_to_give() -> None:
    """Whatever a rule says."""
    labels = {
        "node": "a",
        "UUID": "b",
        "exported_node": "c",
        "job_name": "d",
        "instance": "e",
        "pod": "f",
        "bus_id": "g",
        "xid": "79",
    }
    rule = RULES.by_name["gpu-xid"]
    assert rule.alert is not None
    generous = replace(rule, alert=replace(rule.alert, labels=dict.fromkeys(labels, "x")))
    finding = of_kernel("gpu-xid", "n", datetime.now().astimezone(), labels=labels)
    assert finding_alerts.labels_of_rule(finding, generous) == {"xid": "79"}
