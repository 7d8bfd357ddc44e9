"""Findings: what is one, whom it is about, which of them raise an alert, and when they are over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count, permutations
from typing import Any

import pytest

from tests.support.clocks import ManualClock
from tests.support.findings import GPU, RULES, of_kernel, of_training, told
from trainmedic.wire import envelope
from trainmedic_server import telemetry
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.alert import Alert, AlertRecord, AlertStatus, fingerprint
from trainmedic_server.domain.finding import Finding, Role
from trainmedic_server.domain.finding_codec import FindingUpdate
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.known_finding import FindingEnd, JobPlace, KnownFinding
from trainmedic_server.domain.target import Target, TargetKind
from trainmedic_server.domain.topology import ClusterTopology, Pod, Topology
from trainmedic_server.engine import finding_alerts, node_watch
from trainmedic_server.engine.finding_intake import MOST_EXCERPTS, MOST_OPEN_OF_NODE, FindingIntake
from trainmedic_server.engine.finding_teller import FindingTeller
from trainmedic_server.engine.node_watch import REMEMBERED, NodeWatch
from trainmedic_server.errors import BusUnavailable, TemporaryFailure
from trainmedic_server.ports.findings import FindingFilter
from trainmedic_server.ports.outside import Presence


@dataclass
class PresencesInRedis:
    """Who is there."""

    clock: ManualClock
    job_details: dict[str, dict[str, Any]] = field(default_factory=dict)
    agent_details: dict[str, dict[str, Any]] = field(default_factory=dict)
    launchers_on: dict[str, str] = field(default_factory=dict)

    async def jobs(self) -> list[Presence]:
        return [Presence(name, self.clock.now(), details) for name, details in self.job_details.items()]

    async def agents(self) -> list[Presence]:
        return [Presence(name, self.clock.now(), details) for name, details in self.agent_details.items()]

    async def launchers(self) -> list[Presence]:
        return [Presence(job, self.clock.now(), {"node": node}) for job, node in self.launchers_on.items()]

    def notices(self) -> list[Any]:
        return []

    def discard_notices(self, entries: Iterable[bytes]) -> None:
        raise AssertionError("nobody here takes notices")


class TakingTeller:
    """Takes alerts, or refuses them."""

    def __init__(self) -> None:
        self.told: list[Alert] = []
        self.is_away = False

    async def tell(self, alerts: Iterable[Alert]) -> None:
        if self.is_away:
            raise TemporaryFailure("away")
        self.told += alerts


class FindingWorld:
    """A server's part that knows findings, with time that the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = InMemoryStore()
        self.metrics = telemetry.Metrics()
        self.presences = PresencesInRedis(self.clock)
        self.presences.job_details["llm-1"] = {
            "instance": envelope.new_id(int(self.clock.now().timestamp() * 1000) - 60_000),
            "step": 1,
            "placement": [{"rank": 0, "node": "node-1"}, {"rank": 1, "node": "node-2"}],
        }
        self.topology = Topology()
        self.rules = RULES
        self.taker = TakingTeller()
        self._ids = count(1)
        self.begin()

    def begin(self) -> None:
        """Have a new process of the server, on the same store."""
        self.nodes = NodeWatch(self.presences, self.store, self.clock, self.metrics)
        self.teller = FindingTeller(self.store, self.taker, self.clock, self.metrics, timedelta(minutes=1))
        self.intake = FindingIntake(
            self.store,
            lambda: self.rules,
            lambda: self.topology,
            self.nodes,
            self.clock,
            lambda span: self.clock.now() - span,
            self.metrics,
            lambda: f"{next(self._ids):04}",
            self.teller.touch,
        )

    async def tell(self, *updates: Finding | FindingUpdate) -> None:
        """Have nodes say this, each alone, and let the server do what follows at once."""
        for update in updates:
            await self.intake.take([update if isinstance(update, FindingUpdate) else told(update)])
        await self.tell_alerts()

    async def tell_alerts(self) -> None:
        while await self.teller.tell():
            pass

    async def pass_by(self, **span: float) -> None:
        self.clock.time += timedelta(**span)
        await self.nodes.look()
        await self.intake.check()
        await self.tell_alerts()

    async def findings(self) -> list[KnownFinding]:
        """The oldest first."""
        page, _ = await self.store.findings_page(FindingFilter(), 1000, None)
        return page[::-1]

    async def only(self) -> KnownFinding:
        [known] = await self.findings()
        return known

    def alerts(self) -> list[tuple[str, str]]:
        """Name and status of what was told, in order."""
        return [(alert.name, str(alert.status)) for alert in self.taker.told]


@pytest.fixture
async def world() -> FindingWorld:
    made = FindingWorld()
    await made.nodes.start()
    await made.nodes.look()
    return made


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


# --- which raise an alert -----------------------------------------------------------------------


async def test_a_cascade_alerts_nobody(world: FindingWorld) -> None:
    """It is kept, for the diagnosis."""
    await world.tell(of_training("nccl-timeout", "node-1", "llm-1", 0, world.clock.now()))
    assert (await world.only()).no_alert_because == "its rule raises none"
    assert world.taker.told == []


@pytest.mark.parametrize(
    ("finding", "members", "why"),
    [
        ({"rule": "gpu-xid", "role": Role.TEARDOWN}, {}, "what it says is a teardown, which begins nothing"),
        ({"rule": "gone"}, {}, "no rule of its name is loaded"),
        ({"rule": "gpu-xid", "ago": 3700}, {}, "its lines are more than an hour old"),
        ({"rule": "gpu-xid", "ago": 60}, {"booted": 30}, "its lines are from before the node was booted"),
    ],
    ids=["by its pattern", "of no rule", "old", "before the boot"],
)
async def test_what_raises_no_alert_says_why(
    world: FindingWorld, finding: dict[str, Any], members: dict[str, Any], why: str
) -> None:
    """It is seen in the findings all the same."""
    now = world.clock.now()
    rule, at = finding["rule"], now - timedelta(seconds=finding.get("ago", 0))
    made = of_kernel(rule, "node-1", at, GPU, **({"role": finding["role"]} if "role" in finding else {}))
    booted_at = now - timedelta(seconds=members["booted"]) if members else None
    await world.tell(told(made, booted_at=booted_at))
    assert (await world.only()).no_alert_because == why
    assert world.taker.told == []


async def test_an_old_finding_that_goes_on_raises_its_alert(world: FindingWorld) -> None:
    """With the first line that is not old."""
    now = world.clock.now()
    old = of_kernel("gpu-xid", "node-1", now - timedelta(hours=3), GPU)
    await world.tell(old)
    await world.tell(replace(old, count=2, last_at=now))
    assert world.alerts() == [("GPUXidLogged", "firing")]


# --- confirmation -------------------------------------------------------------------------------


async def test_a_suspected_finding_waits_for_its_confirmation(world: FindingWorld) -> None:
    """Another finding on one of its nodes confirms it, whichever comes first."""
    at = world.clock.now()
    suspect, other = of_training("loader", "node-1", "llm-1", 0, at), of_kernel("gpu-xid", "node-1", at, GPU)
    for first, second in ((suspect, other), (other, suspect)):
        fresh = FindingWorld()
        await fresh.nodes.look()
        await fresh.tell(first)
        if first is suspect:
            known = await fresh.only()
            assert known.is_suspected
            assert known.no_alert_because == "it is suspected: it waits for gpu-xid or NodeDown"
            assert fresh.taker.told == []
        await fresh.tell(second)
        assert sorted(fresh.alerts()) == [("GPUXidLogged", "firing"), ("LoaderSlow", "firing")]
        [known] = [known for known in await fresh.findings() if known.rule == "loader"]
        assert (known.is_suspected, known.confirmed_by) == (False, "gpu-xid")


@pytest.mark.parametrize(
    ("labels", "is_confirmed"),
    [({"node": "node-1"}, True), ({"job_name": "llm-1"}, True), ({"node": "node-2"}, False), ({}, False)],
    ids=str,
)
async def test_an_alert_confirms_what_is_about_the_same(
    world: FindingWorld, labels: dict[str, str], is_confirmed: bool
) -> None:
    """By its node or its job."""
    await world.tell(of_training("loader", "node-1", "llm-1", 0, world.clock.now()))
    now = world.clock.now()
    alert = Alert("f", AlertStatus.FIRING, {"alertname": "NodeDown", **labels}, {}, now)
    await world.store.transact(lambda tx: tx.save_alerts([AlertRecord(alert, now, now)]))
    await world.pass_by(seconds=10)
    assert (await world.only()).confirmed_by == ("NodeDown" if is_confirmed else "")
    assert world.alerts() == ([("LoaderSlow", "firing")] if is_confirmed else [])


async def test_what_nothing_confirms_is_over_without_an_alert(world: FindingWorld) -> None:
    """It stays in the findings as suspected; what confirms it too late, or elsewhere, does not count."""
    at = world.clock.now()
    await world.tell(of_training("loader", "node-1", "llm-1", 0, at), of_kernel("gpu-xid", "node-2", at, GPU))
    await world.pass_by(minutes=11)
    await world.tell(of_kernel("gpu-xid", "node-1", world.clock.now(), GPU))
    known = (await world.findings())[0]
    assert (known.ended_because, known.is_suspected) == (FindingEnd.UNCONFIRMED, True)
    assert ("LoaderSlow", "firing") not in world.alerts()


# --- the end ------------------------------------------------------------------------------------


async def test_after_its_silence_a_finding_is_over(world: FindingWorld) -> None:
    """The alert is told to have resolved; the next line begins a finding, and an alert, anew."""
    world.rules = replace(RULES, rules=(replace(RULES.by_name["cuda-oom"], until=""),))
    finding = of_training("cuda-oom", "node-1", "llm-1", 0, world.clock.now())
    await world.tell(finding)
    await world.pass_by(minutes=14)
    again = replace(finding, count=2, last_at=world.clock.now())
    await world.tell(again)
    await world.pass_by(minutes=14)
    assert (await world.only()).is_open
    await world.pass_by(minutes=2)
    known = await world.only()
    assert (known.ended_because, known.count) == (FindingEnd.SILENCE, 2)
    assert world.alerts()[-1] == ("TrainingOutOfMemory", "resolved")
    await world.tell(again)
    assert not (await world.only()).is_open
    world.clock.sleep(1)
    await world.tell(replace(again, count=3, last_at=world.clock.now()))
    first, second = await world.findings()
    assert (first.count, second.count, second.is_open) == (2, 1, True)
    assert world.taker.told[-1].starts_at > world.taker.told[0].starts_at
    assert world.alerts()[-1] == ("TrainingOutOfMemory", "firing")


async def test_until_boot_lasts_until_the_node_was_booted(world: FindingWorld) -> None:
    """However long nothing is printed; the agent says when."""
    await world.tell(of_kernel("gpu-xid", "node-1", world.clock.now(), GPU))
    world.presences.agent_details["node-1"] = {"booted_at": envelope.write_time(world.clock.now() - timedelta(days=3))}
    await world.pass_by(days=5)
    assert (await world.only()).is_open
    world.presences.agent_details["node-1"] = {"booted_at": envelope.write_time(world.clock.now())}
    await world.pass_by(minutes=5)
    assert (await world.only()).ended_because is FindingEnd.BOOT


async def test_until_boot_ends_where_the_node_is_forgotten(world: FindingWorld) -> None:
    """A week after the last word of a node whose agent is away."""
    await world.tell(of_kernel("gpu-xid", "node-1", world.clock.now(), GPU))
    await world.pass_by(days=6.9)
    assert (await world.only()).is_open
    await world.pass_by(days=0.2)
    assert (await world.only()).ended_because is FindingEnd.FORGOTTEN


async def test_until_ends_lasts_until_its_end_is_read_in_every_stream(world: FindingWorld) -> None:
    """One that ends is not the end of the others."""
    at = world.clock.now()
    one = of_kernel("nfs-away", "node-1", at)
    other = replace(one, id="other")
    await world.tell(one, other, replace(one, is_over=True))
    assert (await world.only()).is_open
    await world.pass_by(days=3)
    await world.tell(replace(other, is_over=True))
    assert (await world.only()).ended_because is FindingEnd.ENDED
    firing = [status for _, status in world.alerts()]
    assert firing[-1] == "resolved"
    assert firing.count("resolved") == 1


async def advance(world: FindingWorld, step: int, instance: str | None = None) -> None:
    details = world.presences.job_details["llm-1"]
    world.presences.job_details["llm-1"] = {**details, "step": step, "instance": instance or details["instance"]}
    await world.pass_by(seconds=10)


async def test_until_attempt_lasts_until_the_next_attempt_makes_progress(world: FindingWorld) -> None:
    """A restart alone is none, nor is a step that the dying process still made."""
    await world.tell(of_training("cuda-oom", "node-1", "llm-1", 0, world.clock.now()))
    await advance(world, 2)
    await world.pass_by(minutes=5)
    restarted = envelope.new_id(int(world.clock.now().timestamp() * 1000))
    await advance(world, 1, restarted)
    assert (await world.only()).is_open
    await advance(world, 2, restarted)
    assert (await world.only()).ended_because is FindingEnd.ATTEMPT


async def test_until_attempt_ends_where_the_job_goes_on_by_itself(world: FindingWorld) -> None:
    """A training that catches its error completes steps again; after the rule's silence that is the end."""
    await world.tell(of_training("cuda-oom", "node-1", "llm-1", 0, world.clock.now()))
    await advance(world, 2)
    assert (await world.only()).is_open
    await world.pass_by(minutes=15)
    assert (await world.only()).ended_because is FindingEnd.ATTEMPT


async def test_until_attempt_ends_with_the_job(world: FindingWorld) -> None:
    """One that has ended as it should has no next attempt."""
    await world.tell(of_training("cuda-oom", "node-1", "llm-1", 0, world.clock.now()))
    await world.pass_by(seconds=5)
    life = JobLife("llm-1", LifeState.ENDED, world.clock.now())
    await world.store.transact(lambda tx: tx.save_job_lives([life]))
    await world.pass_by(seconds=5)
    assert (await world.only()).ended_because is FindingEnd.ATTEMPT


# --- telling ------------------------------------------------------------------------------------


async def test_an_alert_that_fires_is_told_each_minute_with_what_is_new(world: FindingWorld) -> None:
    """And that it is over, once."""
    finding = of_kernel("nfs-away", "node-1", world.clock.now())
    await world.tell(finding)
    await world.tell(replace(finding, count=9))
    await world.pass_by(seconds=61)
    await world.pass_by(seconds=61)
    await world.tell(replace(finding, count=9, is_over=True))
    await world.pass_by(minutes=9)
    assert [status for _, status in world.alerts()] == ["firing", "firing", "firing", "resolved"]
    assert [alert.annotations["count"] for alert in world.taker.told] == ["1", "9", "9", "9"]
    assert len({alert.identity for alert in world.taker.told}) == 1


async def test_while_nobody_takes_alerts_they_wait(world: FindingWorld) -> None:
    """Also over a restart of the server; then they are told with the beginning that they had."""
    world.taker.is_away = True
    began = world.clock.now()
    with pytest.raises(TemporaryFailure):
        await world.tell(of_kernel("nfs-away", "node-1", began))
    world.begin()
    world.clock.time += timedelta(minutes=3)
    world.taker.is_away = False
    await world.tell_alerts()
    assert [alert.starts_at for alert in world.taker.told] == [began]


async def test_what_ends_while_it_is_told_is_told_again(world: FindingWorld) -> None:
    """The end is not lost behind the beginning."""
    finding = of_kernel("nfs-away", "node-1", world.clock.now())

    async def tell(alerts: Iterable[Alert]) -> None:
        world.taker.told += alerts
        await world.intake.take([told(replace(finding, is_over=True))])

    world.teller._teller.tell = tell  # type: ignore[method-assign]
    await world.tell(finding)
    assert [status for _, status in world.alerts()] == ["firing", "resolved"]


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
    labels = {"node": "a", "UUID": "b", "exported_node": "c", "job_name": "d", "instance": "e", "pod": "f", "xid": "79"}
    rule = RULES.by_name["gpu-xid"]
    assert rule.alert is not None
    generous = replace(rule, alert=replace(rule.alert, labels=dict.fromkeys(labels, "x")))
    finding = of_kernel("gpu-xid", "n", datetime.now().astimezone(), labels=labels)
    assert finding_alerts.own_labels(finding, generous) == {"xid": "79"}
