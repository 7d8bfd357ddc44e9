"""Recovery of still needed effects whose lease expired: the loss is recorded and the effect reapplied.

If only the lease ended the effect (`Renewal.has_expired`), the same command is sent again, if ``lease_reapply`` allows
it.

Without an Alertmanager to ask, only alerts reported after this server's start count as firing, until `RESENT_AFTER`.

``set_again_started`` is recorded before the command, ``set_again_done`` after success. In between, the next server
repeats the command; the node applies it once. If it reports a loss without expiry, ``set_again_held`` is recorded.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence, Set
from datetime import timedelta
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core.target import Target
from trainmedic_server import errors, telemetry
from trainmedic_server.domain import places
from trainmedic_server.domain.alert import decisive
from trainmedic_server.domain.claim import Claim
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import LeaseLost, SetAgainDone, SetAgainHeld, SetAgainStarted
from trainmedic_server.domain.playbook import Guards
from trainmedic_server.domain.run import Run, UndoStatus
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.lease_reapply import command_ids_of, contents_of, guard_obstacle, last_event, obstacle
from trainmedic_server.ports.actions import LeasedAction, LeasedEffect, MultiNodeAction, Renewal
from trainmedic_server.ports.outside import AlertSource
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import Transaction

RESENT_AFTER = timedelta(minutes=5)  # Alertmanager's group_interval, within which it repeats failed deliveries

_COMMANDS_AT_ONCE = 200  # Commands per transaction
_UNDO_NOT_BEGUN = (UndoStatus.ARMED, UndoStatus.AVAILABLE)  # so the effect is still needed

PlaybookOf: TypeAlias = Callable[[Run], Awaitable[CompiledPlaybook]]

log = telemetry.logger(__name__)


class _PreparedRun(Struct, frozen=True):
    run: Run
    fires: bool | None  # None if unknown
    guards: Guards


class LeaseRecovery:
    def __init__(self, services: EngineServices, source: AlertSource | None, playbook_of: PlaybookOf) -> None:
        self._services = services
        self._source = source
        self._playbook_of = playbook_of
        self._started_at = services.clock.now()
        self._started_at_loop_time = 0.0  # seconds
        self._recorded_losses: set[tuple[str, str]] = set()  # command ID and node
        self._looked_up: set[str] = set()  # IDs of commands in effect, whose reapplication is recorded as done
        self._settled: set[str] = set()  # IDs of lost commands whose reapplication is not to be finished
        self._busy_runs: set[str] = set()  # IDs of runs with a reapplication in work
        self._changed_at: dict[str, float] = {}  # loop time of a command's last reapplication, by its ID
        self._attempt_numbers = itertools.count()  # for distinct names in `TargetLocks.acting`

    def note_server_start(self) -> None:
        self._started_at = self._services.clock.now()
        self._started_at_loop_time = asyncio.get_running_loop().time()

    async def handle_renewals(self, action: LeasedAction, answers: Sequence[Renewal], asked_at: float) -> None:
        """Record losses and reapply expired effects if allowed. Raises StoreUnavailable."""
        # Called by `leases`, concurrently for different actions and rounds.
        # Slow answers may be from before a reapplication.
        renewals = [each for each in answers if self._changed_at.get(each.effect.command_id, -1.0) < asked_at]
        lost = [  # an uncertain effect may never have begun
            renewal
            for renewal in renewals
            if renewal.outcome == "lost" and (renewal.effect.is_certain or renewal.has_expired)
        ]
        unrecorded = [
            renewal for renewal in lost if (renewal.effect.command_id, renewal.node) not in self._recorded_losses
        ]
        if unrecorded:
            count = await self._services.store.transact(lambda tx: self._record_losses(tx, unrecorded))
            self._recorded_losses |= {(renewal.effect.command_id, renewal.node) for renewal in unrecorded}
            self._services.metrics.leases_lost.inc(count)
        expired = {renewal.effect.command_id: renewal.effect for renewal in renewals if renewal.has_expired}
        # An earlier server may have been killed while reapplying, so look up each command once.
        await self._record_reapplied(
            [renewal for renewal in renewals if renewal.effect.command_id not in self._looked_up]
        )
        await self._record_unfinished([renewal for renewal in lost if not renewal.has_expired])
        by_run: dict[str, list[LeasedEffect]] = {}
        for effect in expired.values():
            by_run.setdefault(effect.run_id, []).append(effect)
        await asyncio.gather(*(self._reapply(action, effects) for effects in by_run.values()))

    def forget_others(self, command_ids: Collection[str]) -> None:
        self._recorded_losses = {loss for loss in self._recorded_losses if loss[0] in command_ids}
        self._changed_at = {name: at for name, at in self._changed_at.items() if name in command_ids}
        self._looked_up &= set(command_ids)
        self._settled &= set(command_ids)

    async def _record_unfinished(self, lost: Sequence[Renewal]) -> None:
        """Record effects whose reapplication began as blocked."""
        new = {renewal.effect.command_id: renewal for renewal in lost if renewal.effect.command_id not in self._settled}
        if not new:
            return

        def record(tx: Transaction) -> None:
            for command_id, renewal in new.items():
                run = tx.run(renewal.effect.run_id)
                if run is None or not _is_needed(run, command_id) or not _is_under_way(tx, run.id, command_id):
                    continue
                why = f"reapplying it began before, and it is not in effect: {renewal.why}"
                self._record_obstacle(tx, run.id, why, asked=True)

        await self._services.store.transact(record)
        self._settled |= new.keys()

    def _record_losses(self, tx: Transaction, lost: Sequence[Renewal]) -> int:  # the number of new losses
        count = 0
        for renewal in lost:
            effect = renewal.effect
            run = tx.run(effect.run_id)
            if run is None or not _is_needed(run, effect.command_id):
                continue  # its undo began after the renewal was sent
            content = LeaseLost(effect.step_id, effect.command_id, renewal.node, renewal.why)
            losses = contents_of(tx, run.id, LeaseLost, after=last_event(tx, run.id, SetAgainDone, content.command_id))
            if any((loss.command_id, loss.place) == (content.command_id, content.place) for _, loss in losses):
                continue
            tx.append([recorded(content, self._services.clock.now(), run.id)])
            count += 1
        return count

    async def _reapply(self, action: LeasedAction, effects: Sequence[LeasedEffect]) -> None:
        run_id = effects[0].run_id
        if run_id in self._busy_runs:
            return  # an earlier round still waits for another attempt on the targets
        self._busy_runs.add(run_id)
        try:
            prepared = await self._prepare(run_id)
            if prepared is not None:
                await self._reapply_now(action, run_id, effects, prepared)
        finally:
            self._busy_runs.discard(run_id)

    async def _reapply_now(
        self, action: LeasedAction, run_id: str, effects: Sequence[LeasedEffect], prepared: _PreparedRun
    ) -> None:
        targets = {target for effect in effects for target in _targets_of(action, effect)}
        nodes = frozenset[str]().union(*map(places.counted_nodes, targets))
        claims = [Claim(target) for target in targets]
        async with self._services.locks.acting(f"{run_id}/again/{next(self._attempt_numbers)}", *claims):
            started = await self._services.store.transact(
                lambda tx: self._record_start(tx, run_id, effects, prepared, nodes)
            )
            if not started or self._services.pause_of(prepared.run, nodes) is not None:
                return  # paused since; a later round continues
            self._looked_up -= {effect.command_id for effect in started}
            self._services.fence()
            until = self._services.clock.now() + action.lease / 3  # the next renewal
            self._note_change(started)
            renewals = await action.renew([replace(effect, again=True) for effect in started], until)
            self._note_change(started)
        self._settled |= {renewal.effect.command_id for renewal in renewals if renewal.outcome == "lost"}
        await self._record_reapplied(renewals)
        failed = [renewal for renewal in renewals if not _is_in_effect(renewal)]
        if failed:
            log.warning("cannot reapply expired effect", run_id=run_id, why=failed[0].why)
            await self._services.store.transact(lambda tx: self._record_obstacle(tx, run_id, failed[0].why, asked=True))

    def _note_change(self, effects: Iterable[LeasedEffect]) -> None:
        now = asyncio.get_running_loop().time()
        self._changed_at |= dict.fromkeys((effect.command_id for effect in effects), now)

    async def _prepare(self, run_id: str) -> _PreparedRun | None:
        run = await self._services.store.transact(lambda tx: tx.run(run_id))
        if run is None:
            return None
        try:
            guards = (await self._playbook_of(run)).definition.guards
        except errors.StoreUnavailable:
            raise
        except errors.TrainmedicError as error:
            reason = f"the playbook's guards are not known: {error}"
            await self._services.store.transact(lambda tx: self._record_obstacle(tx, run_id, reason))
            return None
        return _PreparedRun(run, await self._is_firing(run_id), guards)

    async def _is_firing(self, run_id: str) -> bool | None:  # None if unknown
        alerts = decisive(await self._services.store.transact(lambda tx: tx.alerts_of([run_id]).get(run_id, [])))
        silent_since = self._services.timeline.ago(self._services.limits.assume_resolved_after)
        firing = [alert for alert in alerts if not alert.is_resolved and alert.last_heard_at >= silent_since]
        if any(not record.alert.is_in_alertmanager for record in firing):
            return True
        if self._source is not None:
            try:
                for alert in firing:
                    if await self._source.is_firing(alert.identity):
                        return True
                return False
            except errors.TemporaryFailure as error:
                log.warning("cannot ask Alertmanager whether an alert fires", error=str(error))
        if not firing:
            return False
        # Use event-loop time: the wall clock may be changed.
        listened_for = asyncio.get_running_loop().time() - self._started_at_loop_time
        if listened_for >= RESENT_AFTER.total_seconds():
            return True
        return True if any(alert.last_heard_at >= self._started_at for alert in firing) else None

    def _record_start(
        self,
        tx: Transaction,
        run_id: str,
        effects: Sequence[LeasedEffect],
        prepared: _PreparedRun,
        nodes: Set[str],
    ) -> list[LeasedEffect]:
        run = tx.run(run_id)
        if run is None:
            return []
        needed = [effect for effect in effects if _is_needed(run, effect.command_id)]
        if not needed:
            return []
        topology, now = self._services.topology(), self._services.clock.now()
        allowed, _ = self._services.limits.mode_for(run.target, topology, run.also)
        is_same_act = all(_is_under_way(tx, run.id, effect.command_id) for effect in needed)
        reason = obstacle(tx, run, prepared.fires, allowed, topology, now, is_same_act=is_same_act)
        started: list[LeasedEffect] = []
        for effect in needed if reason is None else ():
            if _is_under_way(tx, run.id, effect.command_id):
                started.append(effect)  # unfinished by a killed server, or failed last time
                continue
            ago = self._services.timeline.by_clock()
            barred_by = guard_obstacle(tx, run, effect.command_id, prepared.guards, ago)
            if barred_by is not None:
                reason = barred_by
                continue
            started.append(effect)
            content = SetAgainStarted(effect.step_id, effect.command_id)
            tx.append([recorded(content, self._services.clock.now(), run.id)])
        if reason is not None:
            self._record_obstacle(tx, run.id, reason)
        if started:
            tx.touch_nodes(run.id, nodes, self._services.clock.now())
        return started

    def _record_obstacle(self, tx: Transaction, run_id: str, reason: str, *, asked: bool = False) -> None:
        """Record why nothing is reapplied, once per reason and loss; after sent commands (`asked`), only the first
        reason.
        """
        since = max((event.seq or 0 for event, _ in contents_of(tx, run_id, LeaseLost)), default=0)
        held = [content for _, content in contents_of(tx, run_id, SetAgainHeld, after=since)]
        is_recorded = any(content.asked for content in held) if asked else bool(held) and held[-1].why == reason
        if not is_recorded:
            tx.append([recorded(SetAgainHeld(reason, asked), self._services.clock.now(), run_id)])

    async def _record_reapplied(self, renewals: Sequence[Renewal]) -> None:
        by_command: dict[str, list[Renewal]] = {}
        for renewal in renewals:
            by_command.setdefault(renewal.effect.command_id, []).append(renewal)
        # A multi-node command is done once it is in effect on all its nodes.
        complete = [of_command for of_command in by_command.values() if all(map(_is_in_effect, of_command))]
        for start in range(0, len(complete), _COMMANDS_AT_ONCE):
            batch = complete[start : start + _COMMANDS_AT_ONCE]
            done = await self._services.store.transact(functools.partial(self._record_done, batch))
            self._looked_up |= {of_command[0].effect.command_id for of_command in batch}
            self._recorded_losses = {loss for loss in self._recorded_losses if loss[0] not in done}
            self._services.metrics.leases_set_again.inc(len(done))

    def _record_done(self, complete: Iterable[Sequence[Renewal]], tx: Transaction) -> list[str]:  # command IDs
        done = []
        for renewals in complete:
            effect = renewals[0].effect
            run_id, command_id = effect.run_id, effect.command_id
            if not _is_under_way(tx, run_id, command_id):
                continue
            output = {renewal.node: dict(renewal.output) for renewal in renewals if renewal.output}
            content = SetAgainDone(effect.step_id, command_id, output)
            tx.append([recorded(content, self._services.clock.now(), run_id)])
            done.append(command_id)
        return done


def _is_in_effect(renewal: Renewal) -> bool:
    return renewal.outcome == "renewed"


def _targets_of(action: LeasedAction, effect: LeasedEffect) -> Iterable[Target]:
    if not isinstance(action, MultiNodeAction):
        return (effect.target,)
    return (effect.target, *action.places(effect.params))


def _is_under_way(tx: Transaction, run_id: str, command_id: str) -> bool:
    return last_event(tx, run_id, SetAgainStarted, command_id) > last_event(tx, run_id, SetAgainDone, command_id)


def _is_needed(run: Run, command_id: str) -> bool:
    return any(
        step.undo is None or step.undo.status in _UNDO_NOT_BEGUN
        for step in run.steps
        if any(command_id in command_ids_of(run, step, attempt) for attempt in step.attempts)
    )
