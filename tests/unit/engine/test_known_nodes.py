"""Nodes that nobody knows: no run, no count for the breaker, and a decision that a later report may overturn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.world import World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.run import Decision, Status
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import StartOrder

MakeWorld = Callable[..., World]
INVENTORY = {f"10.4.0.{number}": f"rack-{number}" for number in range(1, 5)}


async def test_strangers_start_nothing_and_do_not_count_for_the_breaker(world: MakeWorld) -> None:
    """Ten exporters' pods as host names once opened it, and a GPU that was really hot was then refused."""
    w = world(CAP, inventory=INVENTORY, breaker_min_nodes=2, breaker_share=0.5)
    for number in range(10):
        refused = (await w.post(w.alert(gpu="0", node=f"stranger-{number}"))).runs[0]
        assert refused.decision is Decision.TARGET_UNKNOWN
        assert f'node="stranger-{number}" is no node that is known: inventory (4)' in refused.why
    assert await w.store.transact(lambda tx: tx.known_nodes()) == set()
    for number in (1, 2):
        assert (await w.post(w.alert(gpu="0", node=f"rack-{number}"))).runs[0].decision is Decision.STARTED
    assert not w.engine.controls.breaker_open
    # Strangers are no part of the cluster: of four nodes a third one is too many.
    assert (await w.post(w.alert(gpu="0", node="rack-3"))).runs[0].decision is Decision.BREAKER_OPEN


async def test_a_node_that_is_known_by_the_next_report_is_acted_on(world: MakeWorld) -> None:
    """As where its agent was starting; what was refused and still is stays as it was decided."""
    w = world(CAP, inventory=dict(INVENTORY))
    alert = w.alert(gpu="0", node="rack-9")
    assert (await w.post(alert)).runs[0].decision is Decision.TARGET_UNKNOWN
    assert (await w.post(alert)).runs[0].decision is Decision.DUPLICATE
    w.inventory["10.4.0.9"] = "rack-9"
    assert (await w.post(alert)).runs[0].decision is Decision.STARTED
    assert (await w.post(alert)).runs[0].decision is Decision.DUPLICATE
    assert len(await w.runs()) == 2


@pytest.mark.parametrize("node", ["10.4.0.2", "rack-2.lab.example.org", "RACK-2"])
async def test_each_spelling_of_a_node_is_the_same_target(world: MakeWorld, node: str) -> None:
    """So that alerts of two exporters join one run."""
    w = world(CAP, inventory=INVENTORY)
    assert (await w.post(w.alert(gpu="0", node=node))).runs[0].target == "gpu:rack-2/0"


async def test_a_person_is_refused_for_the_same_reason(world: MakeWorld) -> None:
    """And it is on record; the same request again finds that record."""
    w = world(CAP, inventory=INVENTORY)
    order = StartOrder("cap", Target(TargetKind.GPU, node="stranger", gpu="0"))
    by = ByHand("ann", key="once")
    started = await w.engine.start_run(order, by)
    assert (started.run.decision, started.run.status) == (Decision.TARGET_UNKNOWN, Status.NOT_STARTED)
    assert "'stranger' is no node that is known" in started.run.message
    again = await w.engine.start_run(order, by)
    assert (again.is_repeated, again.run.id) == (True, started.run.id)
    known = await w.engine.start_run(StartOrder("cap", Target(TargetKind.GPU, node="10.4.0.3", gpu="0")), ByHand("ann"))
    assert (known.run.decision, known.run.target_key) == (Decision.STARTED, "gpu:rack-3/0")
