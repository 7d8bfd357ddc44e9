"""Renewal of leased effects, such as power caps, which end unless renewed.

Each third of its lease, an effect is renewed: from the end of its attempt until its undo begins or a later step may
have reverted it. Without an undo on resolve, renewal also ends with its run and alert. A hold, such as a job's pause,
is renewed only while a later question of its run is open.

Pauses and the breaker do not stop renewals: otherwise a pause would restore a hot GPU's full power.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from trainmedic_server import errors, telemetry
from trainmedic_server.domain import alert, destinations
from trainmedic_server.domain.approval import Terms, waiting_step
from trainmedic_server.domain.changes import may_have_been_reverted
from trainmedic_server.domain.run import Run, StepState, UndoStatus
from trainmedic_server.engine import loops
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.lease_recovery import LeaseRecovery
from trainmedic_server.ports.actions import Actions, LeasedAction, LeasedEffect
from trainmedic_server.ports.store import Transaction

RENEW_EVERY = timedelta(seconds=15)
_RUNS_AT_ONCE = 200  # Runs read per transaction, because deliveries share the store's only writer
_SHOWN = 8  # nodes in a log line

log = telemetry.logger(__name__)


class _InEffect(NamedTuple):
    action: str
    effect: LeasedEffect
    lease: timedelta  # as granted


class LeaseRenewer:
    def __init__(self, services: EngineServices, recovery: LeaseRecovery) -> None:
        self._services = services
        self._leased: Mapping[str, LeasedAction] = {}  # by action name
        # By command ID: which third of its lease, counted from the start of event-loop time, has been renewed.
        self._last_third: dict[str, int] = {}
        self._recovery = recovery
        self._renewals: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._recovery.note_server_start()
        self._leased = _leased(self._services.actions)
        if not self._leased:
            return
        try:
            # Begin at once: the server may have been down. Use event-loop time: the wall clock may be set back.
            await loops.repeat(self.renew_due, RENEW_EVERY, "leases", self._services.metrics)
        finally:
            for task in self._renewals:
                task.cancel()

    async def renew_due(self) -> None:
        """Start renewing, without waiting for replies: a silent node must not delay others."""
        now, loop_time = self._services.clock.now(), asyncio.get_running_loop().time()
        run_ids = await self._services.store.transact(lambda tx: tx.runs_in_effect(self._leased))
        in_effect: list[_InEffect] = []
        for start in range(0, len(run_ids), _RUNS_AT_ONCE):
            batch = run_ids[start : start + _RUNS_AT_ONCE]
            in_effect += await self._services.store.transact(functools.partial(self._in_effect, batch, now))
        self._services.metrics.leases.set(len(in_effect))
        last_third: dict[str, int] = {}
        due: dict[str, list[LeasedEffect]] = {}
        for action, effect, lease in in_effect:
            # Thirds count from a common start, so that effects on one node share a command. Use event-loop time: the
            # wall clock may be set.
            third = int(loop_time // (lease.total_seconds() / 3))
            if self._last_third.get(effect.command_id) != third:
                due.setdefault(action, []).append(effect)
            last_third[effect.command_id] = third
        self._last_third = last_third
        self._recovery.forget_others(last_third)
        for action, effects in due.items():
            shortest = min(each.lease for each in in_effect if each.action == action)
            task = asyncio.create_task(self._renew(self._leased[action], effects, now + shortest / 3))
            self._renewals.add(task)
            task.add_done_callback(self._renewals.discard)

    def _in_effect(self, run_ids: Sequence[str], now: datetime, tx: Transaction) -> list[_InEffect]:
        not_silent_since = self._services.timeline.ago(self._services.limits.assume_resolved_after)
        runs = tx.runs(run_ids)
        alerts = tx.alerts_of([run.alerts_run_id for run in runs if not run.is_open])
        in_effect = []
        for run in runs:
            decisive = alert.decisive(alerts.get(run.alerts_run_id, ()))
            fires = (not record.is_resolved and record.last_heard_at >= not_silent_since for record in decisive)
            continues = run.is_open or any(fires)
            for step in run.steps:
                action = self._leased.get(step.action or "")
                if action is None:
                    continue
                is_hold = getattr(action, "is_hold", False)
                if may_have_been_reverted(run, step):
                    continue
                if _is_hold_needed(run, step) if is_hold else _is_needed(step, continues):
                    in_effect += [
                        _InEffect(step.action or "", effect, lease)
                        for effect in _effects(run, step, now)
                        if (lease := action.granted(destinations.output_of(step, effect.target)))
                    ]
        return in_effect

    async def _renew(self, action: LeasedAction, effects: Sequence[LeasedEffect], until: datetime) -> None:
        asked_at = asyncio.get_running_loop().time()
        try:
            renewals = await action.renew(effects, until)
            outcomes = Counter(renewal.outcome for renewal in renewals)
            for outcome, count in outcomes.items():
                self._services.metrics.lease_renewals.labels(outcome).inc(count)
            missed = [renewal for renewal in renewals if renewal.outcome in ("refused", "unanswered")]
            if missed:
                places = sorted({renewal.node for renewal in missed})
                log.warning("leases not renewed", places=places[:_SHOWN], of=len(places), why=missed[0].why)
            await self._recovery.handle_renewals(action, renewals, asked_at)
        except errors.StoreUnavailable as error:
            log.warning("cannot record renewals", error=str(error))
        except Exception:  # the boundary of one renewal
            self._services.metrics.loop_errors.labels("leases").inc()
            log.exception("cannot renew leases")


def _leased(actions: Actions) -> Mapping[str, LeasedAction]:
    leased: dict[str, LeasedAction] = {}
    for name in actions.names():
        try:
            action = actions.get(name)
        except errors.PermanentFailure:
            continue  # the registry has logged why
        if isinstance(action, LeasedAction):
            leased[name] = action
    return leased


def _is_needed(step: StepState, run_continues: bool) -> bool:
    if step.undo is None or step.undo.status is UndoStatus.AVAILABLE:
        return run_continues  # no undo will end the effect
    return step.undo.status is UndoStatus.ARMED


def _is_hold_needed(run: Run, step: StepState) -> bool:
    undo = step.undo
    if not run.is_open or undo is None or undo.status not in (UndoStatus.ARMED, UndoStatus.AVAILABLE):
        return False
    asked = waiting_step(run)
    later = run.steps[run.steps.index(step) + 1 :]
    return asked is not None and asked in later and not Terms.of(asked).lapsed


def _effects(run: Run, step: StepState, now: datetime) -> Iterator[LeasedEffect]:
    """Yield possible effects, except of attempts in flight, whose lease has just begun."""
    command_ids: Collection[str] = set()
    for attempt in reversed(step.attempts):
        in_flight = attempt.status == "running" and attempt.deadline > now
        if attempt.status in ("failed", "rejected") or in_flight or attempt.command_id in command_ids:
            continue
        command_ids = {*command_ids, attempt.command_id}
        certain = attempt.status == "applied"
        for target in run.targets_of(step):
            command_id = destinations.command_id_of(attempt.command_id, step, target)
            output = destinations.output_of(step, target) if certain else {}
            yield LeasedEffect(
                *(command_id, run.id, step.id, target, step.params, certain),
                applied_at=attempt.ended_at,
                output=output,
            )
