"""What becomes of an effect whose lease ran out while it was still wanted: it is told, and brought about again.

That happens where a server, Redis or the network was away for longer than the lease. Who holds the effect
then ended it by itself, rightly; what it was for may still be there. So it is brought about once more, as
the same command with the same undo, where nothing but its lease has ended it (`Renewal.has_lapsed`).

It is new harm, unlike a renewal. So it waits, with the reason in the run's story (``set_again_held``), while

- the server is paused, or the breaker is open;
- it is not known that an alert of the run still fires. The Alertmanager is asked where there is one; else
  an alert counts that was heard of since this server began, and after `HEARD_OUT` every one that has not
  resolved, because by then a resolved that nobody was there to take has been sent again;
- the playbook's guards bar it: ``cooldown`` runs from when the effect was last brought about, and
  ``max_runs`` bounds how often a run may do it;

and it never comes about where an undo has begun or was ordered, where the run was cancelled or rejected,
where a person had approved it (once), or where the mode is not ``enforce`` any more.

``set_again_started`` is on record before anybody is asked, ``set_again_done`` after. A server that is killed
in between finds the first without the second, and asks again; who holds the effect knows its id.

Who calls it: ``leases``, with what became of each renewal.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeAlias

from trainmedic_server import errors, telemetry
from trainmedic_server.domain import duration
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.playbook import Guards
from trainmedic_server.domain.run import Event, OrderKind, Run, Status, UndoStatus
from trainmedic_server.domain.target import Target
from trainmedic_server.engine.locks import TargetLocks
from trainmedic_server.ports.actions import HasPlaces, LeasedAction, LeasedEffect, Renewal
from trainmedic_server.ports.fence import Fence
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.outside import AlertSource, Clock
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import RunStore, Transaction

HEARD_OUT = timedelta(minutes=5)
"""Alertmanager's group_interval: after so long it has sent again what it could not deliver."""

_BATCH = 200
"""Commands that are looked up at a time: deliveries share the store's one writer, and must not wait for thousands."""

LOST, STARTED, HELD, DONE = "lease_lost", "set_again_started", "set_again_held", "set_again_done"

_NOT_BEGUN = (UndoStatus.ARMED, UndoStatus.AVAILABLE)
_ENDED_BY_PERSON = (OrderKind.CANCEL, OrderKind.UNDO)

BookOf: TypeAlias = Callable[[Run], Awaitable[CompiledPlaybook]]

log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class _RunFacts:
    """What is known before it is decided. ``fires`` is None where nobody could say."""

    fires: bool | None
    guards: Guards


class ExpiredLeases:
    """One object per server; what it remembers it can do without after a restart."""

    def __init__(
        self,
        store: RunStore,
        clock: Clock,
        limits: EngineLimits,
        metrics: telemetry.Metrics,
        locks: TargetLocks,
        source: AlertSource | None,
        book_of: BookOf,
        fence: Fence,
    ) -> None:
        """`fence` does not return where this server is not the one any more that may act."""
        self._store = store
        self._clock = clock
        self._limits = limits
        self._metrics = metrics
        self._locks = locks
        self._source = source
        self._book_of = book_of
        self._fence = fence
        self._began = (clock.now(), 0.0)
        self._told: set[tuple[str, str]] = set()
        self._looked_up: set[str] = set()
        self._busy: set[str] = set()
        self._numbers = itertools.count()

    def begin(self) -> None:
        """The server begins to listen now."""
        self._began = (self._clock.now(), asyncio.get_running_loop().time())

    async def take_in(self, action: LeasedAction, renewals: Sequence[Renewal]) -> None:
        """Tell what is lost, bring about again what may be, and note what has been. Raises StoreUnavailable."""
        lost = [one for one in renewals if one.outcome == "lost" and (one.effect.is_certain or one.has_lapsed)]
        news = [one for one in lost if (one.effect.command_id, one.place) not in self._told]
        if news:
            recorded = await self._store.transact(lambda tx: self._tell_lost(tx, news))
            self._told |= {(one.effect.command_id, one.place) for one in news}
            self._metrics.leases_lost.inc(recorded)
        lapsed = {one.effect.command_id: one.effect for one in renewals if one.has_lapsed}
        # One that a server before this one had begun to bring about again may stand by now.
        await self._conclude([one for one in renewals if one.effect.command_id not in self._looked_up])
        by_run: dict[str, list[LeasedEffect]] = {}
        for hold in lapsed.values():
            by_run.setdefault(hold.run_id, []).append(hold)
        await asyncio.gather(*(self._set_again(action, holds) for holds in by_run.values()))

    def keep_only(self, command_ids: Collection[str]) -> None:
        """Nothing else is held any more, so nothing else need be remembered."""
        self._told = {pair for pair in self._told if pair[0] in command_ids}
        self._looked_up &= set(command_ids)

    def _tell_lost(self, tx: Transaction, lost: Sequence[Renewal]) -> int:
        """Put into the history, once for each loss, that a lease has run out which was still wanted."""
        recorded = 0
        for renewal in lost:
            hold = renewal.effect
            run = tx.run(hold.run_id)
            if run is None or not _is_held(run, hold.command_id):
                continue  # its undo has begun since it was asked about
            since = _last(tx, run.id, DONE, hold.command_id)
            told = [event for event in tx.events_of(run.id, LOST) if event.data["place"] == renewal.place]
            if any(event.data["command_id"] == hold.command_id and _seq(event) > since for event in told):
                continue
            data = {"step": hold.step_id, "command_id": hold.command_id, "place": renewal.place, "why": renewal.why}
            tx.append([Event(LOST, self._clock.now(), run.id, data=data)])
            recorded += 1
        return recorded

    # --- again ----------------------------------------------------------------------------------------

    async def _set_again(self, action: LeasedAction, holds: Sequence[LeasedEffect]) -> None:
        """What one run has lost: intent, command, outcome. Between other attempts on the same places."""
        run_id = holds[0].run_id
        if run_id in self._busy:
            return  # it waits for another attempt's end
        self._busy.add(run_id)
        try:
            known = await self._known(run_id)
            if known is not None:
                await self._ask(action, run_id, holds, known)
        finally:
            self._busy.discard(run_id)

    async def _ask(self, action: LeasedAction, run_id: str, holds: Sequence[LeasedEffect], known: _RunFacts) -> None:
        places = {place for hold in holds for place in _places(action, hold)}
        async with self._locks.acting(f"{run_id}/again/{next(self._numbers)}", *places):
            begun = await self._store.transact(lambda tx: self._begin(tx, run_id, holds, known))
            if not begun:
                return
            self._looked_up -= {hold.command_id for hold in begun}
            self._fence()
            until = self._clock.now() + action.lease / 3
            renewals = await action.renew([replace(hold, again=True) for hold in begun], until)
        await self._conclude(renewals)
        failed = [one for one in renewals if one.outcome != "renewed"]
        if failed:
            log.warning("what had lapsed could not be set again", run_id=run_id, why=failed[0].why)
            await self._store.transact(lambda tx: self._hold_back(tx, run_id, failed[0].why, asked=True))

    async def _known(self, run_id: str) -> _RunFacts | None:
        run = await self._store.transact(lambda tx: tx.run(run_id))
        if run is None:
            return None
        try:
            guards = (await self._book_of(run)).spec.guards
        except errors.StoreUnavailable:
            raise
        except errors.TrainmedicError as error:
            why = f"the playbook's guards are not known: {error}"
            await self._store.transact(lambda tx: self._hold_back(tx, run_id, why))
            return None
        return _RunFacts(await self._fires(run_id), guards)

    async def _fires(self, run_id: str) -> bool | None:
        """Whether it is known that an alert of the run fires now."""
        alerts = await self._store.transact(lambda tx: tx.alerts_of([run_id]).get(run_id, []))
        silent_since = self._clock.now() - self._limits.assume_resolved_after
        firing = [one for one in alerts if not one.is_resolved and one.last_heard_at >= silent_since]
        if self._source is not None:
            try:
                for one in firing:
                    if await self._source.is_firing(one.identity):
                        return True
                return False
            except errors.TemporaryFailure as error:
                log.warning("the Alertmanager did not say whether an alert still fires", error=str(error))
        if not firing:
            return False
        began, at = self._began
        has_listened = asyncio.get_running_loop().time() - at >= HEARD_OUT.total_seconds()
        return True if has_listened or any(one.last_heard_at >= began for one in firing) else None

    def _begin(
        self, tx: Transaction, run_id: str, holds: Sequence[LeasedEffect], known: _RunFacts
    ) -> list[LeasedEffect]:
        """Those that are to be brought about again, the intent written down; why not, where there are none."""
        run = tx.run(run_id)
        if run is None:
            return []
        wanted = [hold for hold in holds if _is_held(run, hold.command_id)]
        if not wanted:
            return []
        why = self._obstacle(tx, run, known)
        begun: list[LeasedEffect] = []
        for hold in wanted if why is None else ():
            if _last(tx, run.id, STARTED, hold.command_id) > _last(tx, run.id, DONE, hold.command_id):
                begun.append(hold)  # by a server that was killed, or it did not succeed the last time
                continue
            barred = self._barred(tx, run, hold, known.guards)
            if barred is not None:
                why = barred
                continue
            begun.append(hold)
            data = {"step": hold.step_id, "command_id": hold.command_id}
            tx.append([Event(STARTED, self._clock.now(), run.id, data=data)])
        if why is not None:
            self._hold_back(tx, run.id, why)
        return begun

    def _obstacle(self, tx: Transaction, run: Run, known: _RunFacts) -> str | None:
        """Why nothing of the run may be brought about again; None where it may."""
        controls = tx.controls()
        ordered = next((one for one in tx.orders_of([run.id]).get(run.id, ()) if one.kind in _ENDED_BY_PERSON), None)
        if ordered is not None:
            return f"{ordered.actor} has ended the run or ordered its undo"
        if run.status in (Status.CANCELLED, Status.REJECTED):
            return f"the run was {run.status}"
        if not run.mode == self._limits.mode == Mode.ENFORCE:
            return "the mode is not enforce"
        if any(step.kind == "approve" for step in run.steps):
            return "a person approved it once, and not for a second time"
        if controls.paused:
            return f"the server is paused by {controls.paused_by}"
        if controls.breaker_open:
            return controls.breaker_reason or "the breaker is open"
        if known.fires is None:
            return "nobody has said yet that its alert still fires"
        # Asked for before it had its turn, so looked at once more.
        is_over = all(one.is_resolved for one in tx.alerts_of([run.id]).get(run.id, []))
        return "none of its alerts fires" if is_over or not known.fires else None

    def _barred(self, tx: Transaction, run: Run, hold: LeasedEffect, guards: Guards) -> str | None:
        """What the playbook's guards have against it; None for nothing."""
        now = self._clock.now()
        started = [event.at for event in tx.events_of(run.id, STARTED) if event.data["command_id"] == hold.command_id]
        made = [
            one.ended_at or one.started_at
            for step in run.steps
            for one in step.attempts
            if one.command_id == hold.command_id
        ]
        if guards.cooldown and now < max([*started, *made]) + guards.cooldown:
            return f"cooldown: it was last brought about less than {duration.write(guards.cooldown)} ago"
        if guards.max_runs:
            lately = [at for at in started if at > now - guards.max_runs.per]
            if len(lately) >= guards.max_runs.count:
                return f"rate_limited: {len(lately)} times in the last {duration.write(guards.max_runs.per)}"
        return None

    def _hold_back(self, tx: Transaction, run_id: str, why: str, *, asked: bool = False) -> None:
        """Put into the history why not, once for each reason and loss; of what was `asked` for, and did not come
        about, the first reason only, for it may be worded anew each time."""
        since = max(map(_seq, tx.events_of(run_id, LOST)), default=0)
        held = [event.data for event in tx.events_of(run_id, HELD) if _seq(event) > since]
        told = any(data["asked"] for data in held) if asked else bool(held) and held[-1]["why"] == why
        if not told:
            tx.append([Event(HELD, self._clock.now(), run_id, data={"why": why, "asked": asked})])

    async def _conclude(self, renewals: Sequence[Renewal]) -> None:
        """Note what stands again in all its places."""
        by_command: dict[str, list[Renewal]] = {}
        for one in renewals:
            by_command.setdefault(one.effect.command_id, []).append(one)
        whole = [places for places in by_command.values() if all(map(_stands, places))]
        for start in range(0, len(whole), _BATCH):
            await self._note_whole(whole[start : start + _BATCH])

    async def _note_whole(self, whole: Sequence[Sequence[Renewal]]) -> None:
        done = await self._store.transact(
            lambda tx: [places[0].effect.command_id for places in whole if self._note_done(tx, places)]
        )
        self._looked_up |= {places[0].effect.command_id for places in whole}
        self._told = {pair for pair in self._told if pair[0] not in done}
        self._metrics.leases_set_again.inc(len(done))

    def _note_done(self, tx: Transaction, renewals: Sequence[Renewal]) -> bool:
        hold = renewals[0].effect
        if _last(tx, hold.run_id, STARTED, hold.command_id) <= _last(tx, hold.run_id, DONE, hold.command_id):
            return False
        output: Mapping[str, object] = {one.place: dict(one.output) for one in renewals if one.output}
        data = {"step": hold.step_id, "command_id": hold.command_id, "output": output}
        tx.append([Event(DONE, self._clock.now(), hold.run_id, data=data)])
        return True


def _stands(renewal: Renewal) -> bool:
    return renewal.outcome == "renewed"


def _places(action: LeasedAction, hold: LeasedEffect) -> Iterable[Target]:
    if not isinstance(action, HasPlaces):
        return (hold.target,)
    return (hold.target, *action.places(hold.params))


def _is_held(run: Run, command_id: str) -> bool:
    return any(
        step.undo is None or step.undo.status in _NOT_BEGUN
        for step in run.steps
        if any(attempt.command_id == command_id for attempt in step.attempts)
    )


def _last(tx: Transaction, run_id: str, kind: str, command_id: str) -> int:
    """The place in the history of the last such event about a command; 0 where there is none."""
    return max(
        (_seq(event) for event in tx.events_of(run_id, kind) if event.data["command_id"] == command_id), default=0
    )


def _seq(event: Event) -> int:
    return event.seq or 0
