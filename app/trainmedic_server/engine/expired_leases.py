"""What becomes of an effect whose lease ran out while it was still needed: that is recorded, and it is set again.

A lease runs out where the server, Redis or the network was away for longer than the lease. Whoever holds the effect
has then ended it by itself, rightly; but what it was for may still be there. So it is brought about once more, as
the same command with the same undo, where nothing but its lease has ended it (`Renewal.has_expired`).

Unlike a renewal this is new harm. So it waits, with the reason in the run's story (``set_again_held``), while

- the server is paused, or the breaker is open;
- it is not known that an alert of the run still fires. The Alertmanager is asked where there is one. Elsewhere
  an alert counts as firing if it was heard of since this server began; and after `RESENT_AFTER` every alert counts
  that has not resolved, because by then a resolved that found no server has been sent again;
- the playbook's guards bar it: ``cooldown`` runs from when the effect was last brought about, and
  ``max_runs`` bounds how often a run may do it.

It is never set again where an undo has begun or was ordered, where the run was cancelled or rejected, where a
person had approved it (once), or where the mode is not ``enforce`` any more.

``set_again_started`` is on record before anybody is asked, ``set_again_done`` after. A server that is killed in
between finds the first without the second, and asks again; whoever holds the effect knows its id, so that nothing
is applied twice.

Who calls it: ``leases``, with what became of each renewal.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeAlias

from trainmedic_server import errors, telemetry
from trainmedic_server.domain.playbook import Guards
from trainmedic_server.domain.run import Event, Run, UndoStatus
from trainmedic_server.domain.target import Target
from trainmedic_server.engine.locks import TargetLocks
from trainmedic_server.engine.set_again import DONE, HELD, LOST, STARTED, barred, last_event, obstacle, seq_of
from trainmedic_server.ports.actions import HasPlaces, LeasedAction, LeasedEffect, Renewal
from trainmedic_server.ports.fence import Fence
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.ports.outside import AlertSource, Clock
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import RunStore, Transaction

RESENT_AFTER = timedelta(minutes=5)
"""Alertmanager's group_interval: after so long it has sent again what it could not deliver."""

_BATCH = 200
"""How many commands one transaction looks up: deliveries share the store's one writer, and must not wait for
thousands."""

_NOT_BEGUN = (UndoStatus.ARMED, UndoStatus.AVAILABLE)

PlaybookOf: TypeAlias = Callable[[Run], Awaitable[CompiledPlaybook]]

log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class _RunFacts:
    """What was asked about a run before the transaction that decides."""

    fires: bool | None
    """Whether an alert of the run fires; None where nobody could say."""
    guards: Guards


class ExpiredLeases:
    """Sets expired effects again. One object per server. What it remembers saves look-ups only, so that nothing is
    lost by a restart."""

    def __init__(
        self,
        store: RunStore,
        clock: Clock,
        limits: EngineLimits,
        metrics: telemetry.Metrics,
        locks: TargetLocks,
        source: AlertSource | None,
        playbook_of: PlaybookOf,
        fence: Fence,
    ) -> None:
        self._store = store
        self._clock = clock
        self._limits = limits
        self._metrics = metrics
        self._locks = locks
        self._source = source
        self._playbook_of = playbook_of
        self._fence = fence
        self._began_at = clock.now()
        self._began_at_loop_time = 0.0
        self._recorded_losses: set[tuple[str, str]] = set()
        """Command id and place of each loss that is in the history."""
        self._looked_up: set[str] = set()
        """Ids of commands that are known not to be begun without being done."""
        self._busy_runs: set[str] = set()
        self._attempt_numbers = itertools.count()

    def begin(self) -> None:
        """Note that the server begins to listen now."""
        self._began_at = self._clock.now()
        self._began_at_loop_time = asyncio.get_running_loop().time()

    async def take_in(self, action: LeasedAction, renewals: Sequence[Renewal]) -> None:
        """Record what is lost, set again what may be, and record what has been. Raises StoreUnavailable."""
        lost = [
            renewal
            for renewal in renewals
            if renewal.outcome == "lost" and (renewal.effect.is_certain or renewal.has_expired)
        ]
        news = [renewal for renewal in lost if (renewal.effect.command_id, renewal.place) not in self._recorded_losses]
        if news:
            recorded = await self._store.transact(lambda tx: self._record_losses(tx, news))
            self._recorded_losses |= {(renewal.effect.command_id, renewal.place) for renewal in news}
            self._metrics.leases_lost.inc(recorded)
        expired = {renewal.effect.command_id: renewal.effect for renewal in renewals if renewal.has_expired}
        # An earlier server may have been killed between the begin and the end of setting an effect again, which
        # may stand by now. So each command is looked up once.
        await self._conclude([renewal for renewal in renewals if renewal.effect.command_id not in self._looked_up])
        by_run: dict[str, list[LeasedEffect]] = {}
        for effect in expired.values():
            by_run.setdefault(effect.run_id, []).append(effect)
        await asyncio.gather(*(self._set_again(action, effects) for effects in by_run.values()))

    def keep_only(self, command_ids: Collection[str]) -> None:
        """Forget all commands but these, because no others have effects any more."""
        self._recorded_losses = {loss for loss in self._recorded_losses if loss[0] in command_ids}
        self._looked_up &= set(command_ids)

    def _record_losses(self, tx: Transaction, lost: Sequence[Renewal]) -> int:
        """Put into the history, once for each loss, that a lease has run out while the effect was needed."""
        recorded = 0
        for renewal in lost:
            effect = renewal.effect
            run = tx.run(effect.run_id)
            if run is None or not _is_needed(run, effect.command_id):
                continue  # its undo has begun since it was asked about
            since = last_event(tx, run.id, DONE, effect.command_id)
            losses = [event for event in tx.events_of(run.id, LOST) if event.data["place"] == renewal.place]
            if any(event.data["command_id"] == effect.command_id and seq_of(event) > since for event in losses):
                continue
            data = {"step": effect.step_id, "command_id": effect.command_id, "place": renewal.place, "why": renewal.why}
            tx.append([Event(LOST, self._clock.now(), run.id, data=data)])
            recorded += 1
        return recorded

    async def _set_again(self, action: LeasedAction, effects: Sequence[LeasedEffect]) -> None:
        """Set again what one run has lost."""
        run_id = effects[0].run_id
        if run_id in self._busy_runs:
            return  # an earlier round still waits for the end of another attempt on the same places
        self._busy_runs.add(run_id)
        try:
            facts = await self._facts(run_id)
            if facts is not None:
                await self._ask(action, run_id, effects, facts)
        finally:
            self._busy_runs.discard(run_id)

    async def _ask(self, action: LeasedAction, run_id: str, effects: Sequence[LeasedEffect], facts: _RunFacts) -> None:
        """Put the intent on record, send the commands, and put the outcome on record.

        All this happens while no other attempt is in flight on the same places.
        """
        places = {place for effect in effects for place in _places(action, effect)}
        async with self._locks.acting(f"{run_id}/again/{next(self._attempt_numbers)}", *places):
            begun = await self._store.transact(lambda tx: self._begin(tx, run_id, effects, facts))
            if not begun:
                return
            self._looked_up -= {effect.command_id for effect in begun}
            self._fence()
            until = self._clock.now() + action.lease / 3
            renewals = await action.renew([replace(effect, again=True) for effect in begun], until)
        await self._conclude(renewals)
        failed = [renewal for renewal in renewals if not _is_in_effect(renewal)]
        if failed:
            log.warning("what had lapsed could not be set again", run_id=run_id, why=failed[0].why)
            await self._store.transact(lambda tx: self._hold_back(tx, run_id, failed[0].why, asked=True))

    async def _facts(self, run_id: str) -> _RunFacts | None:
        """What others than the store have to be asked; None where the guards are not known, so that nothing may be
        set again."""
        run = await self._store.transact(lambda tx: tx.run(run_id))
        if run is None:
            return None
        try:
            guards = (await self._playbook_of(run)).spec.guards
        except errors.StoreUnavailable:
            raise
        except errors.TrainmedicError as error:
            reason = f"the playbook's guards are not known: {error}"
            await self._store.transact(lambda tx: self._hold_back(tx, run_id, reason))
            return None
        return _RunFacts(await self._fires(run_id), guards)

    async def _fires(self, run_id: str) -> bool | None:
        """Whether it is known that an alert of the run fires now."""
        alerts = await self._store.transact(lambda tx: tx.alerts_of([run_id]).get(run_id, []))
        silent_since = self._clock.now() - self._limits.assume_resolved_after
        firing = [alert for alert in alerts if not alert.is_resolved and alert.last_heard_at >= silent_since]
        if self._source is not None:
            try:
                for alert in firing:
                    if await self._source.is_firing(alert.identity):
                        return True
                return False
            except errors.TemporaryFailure as error:
                log.warning("the Alertmanager did not say whether an alert still fires", error=str(error))
        if not firing:
            return False
        # By the loop's time, because the time of day may be set.
        listened_for = asyncio.get_running_loop().time() - self._began_at_loop_time
        if listened_for >= RESENT_AFTER.total_seconds():
            return True
        return True if any(alert.last_heard_at >= self._began_at for alert in firing) else None

    def _begin(
        self, tx: Transaction, run_id: str, effects: Sequence[LeasedEffect], facts: _RunFacts
    ) -> list[LeasedEffect]:
        """Put on record which effects are to be set again, or why none is; return them."""
        run = tx.run(run_id)
        if run is None:
            return []
        needed = [effect for effect in effects if _is_needed(run, effect.command_id)]
        if not needed:
            return []
        reason = obstacle(tx, run, facts.fires, self._limits.mode)
        begun: list[LeasedEffect] = []
        for effect in needed if reason is None else ():
            if last_event(tx, run.id, STARTED, effect.command_id) > last_event(tx, run.id, DONE, effect.command_id):
                begun.append(effect)  # by a server that was killed, or it did not succeed the last time
                continue
            barred_by = barred(tx, run, effect.command_id, facts.guards, self._clock.now())
            if barred_by is not None:
                reason = barred_by
                continue
            begun.append(effect)
            data = {"step": effect.step_id, "command_id": effect.command_id}
            tx.append([Event(STARTED, self._clock.now(), run.id, data=data)])
        if reason is not None:
            self._hold_back(tx, run.id, reason)
        return begun

    def _hold_back(self, tx: Transaction, run_id: str, reason: str, *, asked: bool = False) -> None:
        """Put into the history why nothing is set again, once for each reason and loss. Where it was `asked` for and
        failed, only the first reason is recorded, because its wording may differ each time."""
        since = max(map(seq_of, tx.events_of(run_id, LOST)), default=0)
        held = [event.data for event in tx.events_of(run_id, HELD) if seq_of(event) > since]
        is_recorded = any(data["asked"] for data in held) if asked else bool(held) and held[-1]["why"] == reason
        if not is_recorded:
            tx.append([Event(HELD, self._clock.now(), run_id, data={"why": reason, "asked": asked})])

    async def _conclude(self, renewals: Sequence[Renewal]) -> None:
        """Record which effects are in effect again in all their places."""
        by_command: dict[str, list[Renewal]] = {}
        for renewal in renewals:
            by_command.setdefault(renewal.effect.command_id, []).append(renewal)
        complete = [of_command for of_command in by_command.values() if all(map(_is_in_effect, of_command))]
        for start in range(0, len(complete), _BATCH):
            batch = complete[start : start + _BATCH]
            done = await self._store.transact(functools.partial(self._record_done, batch))
            self._looked_up |= {of_command[0].effect.command_id for of_command in batch}
            self._recorded_losses = {loss for loss in self._recorded_losses if loss[0] not in done}
            self._metrics.leases_set_again.inc(len(done))

    def _record_done(self, complete: Iterable[Sequence[Renewal]], tx: Transaction) -> list[str]:
        """The ids of the commands of which it is new that they were set again."""
        done = []
        for renewals in complete:
            effect = renewals[0].effect
            run_id, command_id = effect.run_id, effect.command_id
            if last_event(tx, run_id, STARTED, command_id) <= last_event(tx, run_id, DONE, command_id):
                continue
            output = {renewal.place: dict(renewal.output) for renewal in renewals if renewal.output}
            data = {"step": effect.step_id, "command_id": command_id, "output": output}
            tx.append([Event(DONE, self._clock.now(), run_id, data=data)])
            done.append(command_id)
        return done


def _is_in_effect(renewal: Renewal) -> bool:
    return renewal.outcome == "renewed"


def _places(action: LeasedAction, effect: LeasedEffect) -> Iterable[Target]:
    if not isinstance(action, HasPlaces):
        return (effect.target,)
    return (effect.target, *action.places(effect.params))


def _is_needed(run: Run, command_id: str) -> bool:
    """Whether the effect of the command is not being taken back."""
    return any(
        step.undo is None or step.undo.status in _NOT_BEGUN
        for step in run.steps
        if any(attempt.command_id == command_id for attempt in step.attempts)
    )
