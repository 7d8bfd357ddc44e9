"""Which findings raise an alert, when they are confirmed and over, and how all of that is told."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.findings import GPU, RULES, of_kernel, of_training, told
from tests.unit.engine.finding_world import FindingWorld
from trainmedic.wire import envelope
from trainmedic_logs.domain.finding import Role
from trainmedic_logs.domain.known_finding import FindingEnd
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_server.domain.alert import Alert, AlertRecord, AlertStatus
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.errors import TemporaryFailure


@pytest.fixture
async def world() -> FindingWorld:
    return await FindingWorld.begun()


# --- which raise one ----------------------------------------------------------------------------


async def test_a_cascade_alerts_nobody(world: FindingWorld) -> None:
    """It is kept, for the diagnosis."""
    await world.tell(of_training("nccl-timeout", "node-1", "llm-1", 0, world.clock.now()))
    assert (await world.only()).no_alert_because == "its rule raises none"
    assert world.taker.told == []


@pytest.mark.parametrize(
    ("finding", "members", "why"),
    [
        ({"rule": "gpu-xid", "role": Role.TEARDOWN}, {}, "its role is teardown, which raises no alert"),
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


async def test_the_texts_of_an_alert_have_no_secret(world: FindingWorld) -> None:
    """A field alone does not show what it is; the name before it in a rule's text does."""
    rule, text = RULES.by_name["loader"], "it asked with token={{ fields.token }}"
    assert rule.alert is not None
    alert = replace(rule.alert, confirm=None, summary=text, description=text)
    world.rules = RuleSet((replace(rule, alert=alert),))
    await world.tell(of_training("loader", "node-1", "llm-1", 0, world.clock.now(), fields={"token": "geheim"}))
    [raised] = world.taker.told
    assert {raised.annotations[name] for name in ("summary", "description")} == {"it asked with token=***"}


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
            assert known.no_alert_because == "suspected: waits for gpu-xid or NodeDown"
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

    world.teller._sender.tell = tell  # type: ignore[method-assign]
    await world.tell(finding)
    assert [status for _, status in world.alerts()] == ["firing", "resolved"]
