"""What people decide holds at any kill: the server dies before or after each commit, and the outcome is the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from tests.unit.engine.world import World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain import approval
from trainmedic_server.domain.pause import PauseOrder, Scope
from trainmedic_server.domain.run import OrderKind, Run, Status
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import StartOrder

ASKING = """
playbook: careful
on: {alert: Hot}
target: node
steps:
  - id: sure
    approve: {message: "go on?", count: 2, remind: 10m, escalate: {by: [lead], on_timeout: reject}}
    timeout: 25m
    on_timeout: escalate
  - {id: cap, action: test.cap, undo: on_resolve}
"""


_COUNTED = ("Recorder", "DeliveryIntake", "Engine.order", "Engine._change", "ManualStarter")
"""Whose commits are counted: those in which something is decided, and no heartbeats."""


_MAY_DIFFER = ("alert_repeated", "step_resumed", "approval_reminded", "waiting_for_resume")
"""What happens again, or not, when the server was away for a while."""


class DoomedStore(InMemoryStore):
    """A store whose process dies at a commit: before it, so that nothing of it is kept, or after it, so that nobody
    hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        self.before = False
        self.died = asyncio.Event()

    async def transact(self, work: Callable[[Any], Any]) -> Any:
        if not work.__qualname__.startswith(_COUNTED):
            return await super().transact(work)
        self.left -= 1
        if self.left == 0 and self.before:
            await self._die()
        done = await super().transact(work)
        if self.left == 0 and not self.before:
            await self._die()
        return done

    async def _die(self) -> None:
        self.died.set()
        await asyncio.Event().wait()


async def outlive(w: World, store: DoomedStore, request: Callable[[], Awaitable[object]]) -> None:
    """Have a request answered, over a death of the server: as people do, by asking again."""
    while True:
        asked = asyncio.ensure_future(request())
        died = asyncio.ensure_future(store.died.wait())
        await asyncio.wait((asked, died), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            died.cancel()
            try:
                await asked
            except errors.Conflict:
                return  # it had been taken before the death
            return
        asked.cancel()
        await revive(w, store)


async def revive(w: World, store: DoomedStore) -> None:
    store.died.clear()
    await w.restart()


async def pass_time(w: World, store: DoomedStore, seconds: float) -> None:
    """Let time pass; a server that dies is started again within a minute."""
    for _ in range(round(seconds / 30)):
        await w.pass_time(30)
        if store.died.is_set():
            await revive(w, store)


async def night(fatal: int, *, before: bool) -> tuple[Run, list[str], dict[str, int], int]:
    """An evening with an approval, a pause and a start by hand; what came of it, and how many commits it took."""
    store = DoomedStore()
    w = World(ASKING, store=store, max_age=timedelta(hours=3))
    await w.engine.start()
    store.left, store.before = fatal, before
    alert = w.alert(node="n1")
    await outlive(w, store, lambda: w.post(alert))
    await pass_time(w, store, 26 * 60)
    (asked,) = await w.runs()
    await outlive(w, store, lambda: w.engine.order(asked.id, OrderKind.APPROVE, "ann"))
    order = PauseOrder(Scope(node="n1"), "fans", length=timedelta(minutes=5))
    await outlive(w, store, lambda: w.engine.pause("ann", order))
    await outlive(w, store, lambda: w.engine.order(asked.id, OrderKind.APPROVE, "bob"))
    await pass_time(w, store, 60)
    assert w.calls() == {}, "nothing is done while it is paused"
    wanted = StartOrder("careful", Target(TargetKind.NODE, node="n2"))
    await outlive(w, store, lambda: w.engine.start_run(wanted, ByHand("ann", key="once")))
    await pass_time(w, store, 600)
    kinds = [event.kind for event in (await store.record(asked.id)).events]  # type: ignore[union-attr]
    told = [kind for kind in kinds if kind not in _MAY_DIFFER]
    run = await w.run(asked.id)
    assert len(await w.runs()) == 2, "one run by hand, however often it was asked for"
    assert w.engine.controls.pauses == ()
    # A receiver knows a command by its id, and carries it out once.
    calls = {name: len({call.command_id for call in w.actions[name].calls}) for name in w.calls()}
    commits = -store.left
    await w.engine.stop()
    await store.close()
    return run, told, calls, commits


async def test_what_people_decide_holds_at_any_kill() -> None:
    """No answer is lost or counted twice, no question put twice, nothing done while paused, nothing started twice."""
    run, told, calls, commits = await night(0, before=False)
    assert (run.status, approval.approved_by(run), calls) == (Status.SUCCEEDED, ("ann", "bob"), {"cap": 1})
    assert told.count("approval_requested") == told.count("approval_escalated") == 1
    for fatal, before in itertools.product(range(1, commits), (True, False)):
        killed, events, effects, _ = await night(fatal, before=before)
        place = f"killed {'before' if before else 'after'} commit {fatal}"
        assert (killed.status, approval.approved_by(killed)) == (run.status, ("ann", "bob")), place
        assert events == told, place
        assert effects == calls, place
