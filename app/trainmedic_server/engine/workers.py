"""All drivers: starting them, touching them when something changes, and resuming runs after a restart.

Who calls it: ``service``. Not here: carrying one run through (``driver``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from datetime import datetime, timedelta

from trainmedic.wire.backoff import Backoff
from trainmedic_core import duration
from trainmedic_server import errors, telemetry
from trainmedic_server.domain.run import Decision, Run
from trainmedic_server.engine import approval_steps, claims, plan
from trainmedic_server.engine.admission_changes import StartedRun
from trainmedic_server.engine.driver import Driver
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.plan_values import OutsideState, RunDraft, RunPlan
from trainmedic_server.engine.recorder import RunSnapshot
from trainmedic_server.ports.ending import end_tasks
from trainmedic_server.ports.playbooks import CompiledPlaybook

_READ_AT_ONCE = 100
"""Versions of playbooks that are kept compiled for who only reads."""

_LAST_COMMIT_SECONDS = 1.0
"""How long a server that stops tries to put on record what it had not begun."""

log = telemetry.logger(__name__)


class Workers:
    """One task for each run that is open or has an undo due."""

    def __init__(self, services: EngineServices) -> None:
        self._services = services
        self._drivers: dict[str, Driver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._touched_early: set[str] = set()
        self._awaited: dict[str, asyncio.Future[Driver | None]] = {}
        """Who waits for a driver that is about to begin."""
        self._read_before: dict[tuple[str, str], CompiledPlaybook] = {}
        self._stopped = False

    def start(self, started: StartedRun) -> None:
        """Drive a run that has just been admitted."""
        run, outside = started.run, OutsideState((started.alert,))
        self._services.metrics.open_runs.inc()
        self._services.metrics.show_run(None, run)
        claim = claims.of_run(run, self._services.actions)
        if not self._services.locks.try_acquire(run.id, claim):
            self._services.locks.wait(run.id, claim)  # This comes before the drivers of runs that are admitted later.
        received_at = started.alert.first_heard_at
        self._launch(Driver(run, started.playbook, outside, self._services, received_at, started.then))

    def touch(self, run_ids: Iterable[str]) -> None:
        """Have the drivers of these runs read what has changed in the store; a closed run gets one again."""
        for run_id in run_ids:
            driver = self._drivers.get(run_id)
            if driver is not None:
                driver.touch()
            elif run_id in self._tasks:
                self._touched_early.add(run_id)
            else:
                self._spawn(run_id, self._revive(run_id))

    def touch_all(self) -> None:
        """Have every driver read a switch that has changed."""
        self.touch(list(self._drivers))

    async def planned(self, run_id: str, at_most: float) -> None:
        """Return once the run's driver has planned with all that it was touched for, or after `at_most` seconds."""
        try:
            async with asyncio.timeout(at_most):
                driver = self._drivers.get(run_id) or await self._next_driver(run_id)
                if driver is not None:
                    await driver.planned()
        except TimeoutError:
            return

    async def recover(self, down_for: timedelta) -> None:
        """Resume what an earlier process left: open runs, and undos that are due.

        Runs that have begun take their targets before those that still waited for one; attempts that
        were in flight are resumed in the order in which they were begun.
        """
        unfinished = await self._services.store.transact(lambda tx: tx.unfinished())
        unfinished.sort(key=lambda run: (run.waiting_on == "target", _in_flight_since(run) or run.created_at, run.id))
        snapshots = await asyncio.gather(*(self._services.recorder.snapshot(run.id) for run in unfinished))
        for snapshot in snapshots:
            if snapshot is not None:
                self._services.metrics.open_runs.inc(snapshot.run.is_open)
                self._services.metrics.show_run(None, snapshot.run)
                await self._recover_run(snapshot, down_for)
        if unfinished:
            log.info("resumed unfinished runs", count=len(unfinished), down_for=duration.write(down_for))

    async def stop(self) -> None:
        """Cancel all drivers. Their runs continue when the next process starts."""
        self._stopped, drivers = True, list(self._drivers.values())
        await end_tasks(self._tasks.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_COMMIT_SECONDS):
                await asyncio.gather(*(self._take_back(driver) for driver in drivers))

    async def _take_back(self, driver: Driver) -> None:
        """What goes wrong with one run keeps no other one's record from being set right, nor the server from ending."""
        try:
            await driver.take_back_unbegun()
        except Exception:  # nobody is left who could tell it, and the others must not end with it
            log.exception("an attempt that was not begun stays on record as running", run_id=driver.run.id)

    async def _recover_run(self, snapshot: RunSnapshot, down_for: timedelta) -> None:
        run, playbook = snapshot.run, None
        services = self._services
        outside = OutsideState(snapshot.alerts, snapshot.orders).under(services.controls(), services.pause_of(run))
        try:
            playbook = await self.playbook_of(run)
        except errors.StoreUnavailable:
            raise
        except errors.TrainmedicError as error:
            if run.is_open:
                log.error("a run cannot go on", run_id=run.id, why=str(error))
                run = await self._close(run, plan.fail_unreadable(self._draft(run, outside, None), str(error)))
        draft = self._draft(run, outside, playbook)
        reason = self._stale(draft, down_for) if run.is_open else None
        if reason is not None:
            run = await self._close(run, plan.cancel_or_not_start(draft, reason, Decision.STALE))
            self._services.metrics.decisions.labels(run.playbook, str(Decision.STALE)).inc()
        if run.is_open or run.owes_undo:
            self._launch(Driver(run, playbook, outside, self._services, None))

    async def _close(self, run: Run, closing: RunPlan) -> Run:
        await self._services.recorder.record(closing.run, run, closing.events)
        self._services.count_closed(closing.run)
        self._services.metrics.show_run(run, closing.run)
        return closing.run

    def _draft(self, run: Run, outside: OutsideState, playbook: CompiledPlaybook | None) -> RunDraft:
        return RunDraft(run, outside, self._services.planning_context(playbook), self._services.clock.now())

    def _stale(self, draft: RunDraft, down_for: timedelta) -> str | None:
        """Why a run must not act any more after a downtime; None where it goes on.

        A run that has acted goes on unless the server was down for longer than the maximum age; so does one that waits
        for approval or in a wait step. A run that was rejected goes on in any case, and ends as rejected.
        """
        if approval_steps.is_rejected(draft):
            return None
        limit = self._services.limits.max_age
        if down_for > limit:
            down = duration.write_rounded(down_for)
            return f"the server was down for {down}, over the maximum age of {duration.write(limit)}"
        return None if plan.has_begun(draft.run) else plan.why_stale(draft)

    async def playbook_of(self, run: Run) -> CompiledPlaybook:
        """The playbook in the version that the run started with. Raises NotFound, PlaybookError, StoreUnavailable."""
        loaded = self._services.catalog.get(run.playbook)
        if loaded is not None and loaded.version == run.version:
            return loaded
        text = await self._services.store.transact(lambda tx: tx.playbook_text(run.playbook, run.version))
        if text is None:
            raise errors.NotFound(f"the text of playbook {run.playbook}, version {run.version}, is not in the store")
        return self._services.catalog.compile(text, f"{run.playbook}@{run.version[:12]}")

    async def playbook_for_reading(self, run: Run) -> CompiledPlaybook | None:
        """As `playbook_of`, for who asks often; None where it cannot be read. Raises StoreUnavailable."""
        key = (run.playbook, run.version)
        if key not in self._read_before:
            try:
                playbook = await self.playbook_of(run)
            except errors.StoreUnavailable:
                raise
            except errors.TrainmedicError:
                return None
            if len(self._read_before) >= _READ_AT_ONCE:
                self._read_before.clear()
            self._read_before[key] = playbook
        return self._read_before[key]

    def driven(self, run_id: str) -> RunSnapshot | None:
        """Return the run as its driver has it, with the driver's knowledge of it. None if no driver has it."""
        driver = self._drivers.get(run_id)
        return driver.snapshot if driver is not None else None

    async def _revive(self, run_id: str) -> None:
        """Drive a closed run again, because an undo of it may be due."""
        snapshot = await self._services.recorder.snapshot(run_id)
        if snapshot is None or not snapshot.run.steps:
            self._tell_of_driver(run_id, None)
            return
        outside = OutsideState(snapshot.alerts, snapshot.orders)
        driver = self._drivers[run_id] = Driver(snapshot.run, None, outside, self._services, None)
        if run_id in self._touched_early:
            # It was touched while the snapshot was read, which may be older than what it was touched for.
            self._touched_early.discard(run_id)
            driver.touch()
        self._tell_of_driver(run_id, driver)
        await self._drive(driver)

    async def _next_driver(self, run_id: str) -> Driver | None:
        """The driver that a closed run gets because it was touched; None where it gets none."""
        if run_id not in self._tasks:
            return None
        begun = self._awaited.setdefault(run_id, asyncio.get_running_loop().create_future())
        return await asyncio.shield(begun)

    def _tell_of_driver(self, run_id: str, driver: Driver | None) -> None:
        begun = self._awaited.pop(run_id, None)
        if begun is not None:
            begun.set_result(driver)

    def _launch(self, driver: Driver) -> None:
        self._drivers[driver.run.id] = driver
        self._spawn(driver.run.id, self._drive(driver))

    def _spawn(self, run_id: str, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks[run_id] = task
        task.add_done_callback(lambda _: self._ended(run_id))

    def _ended(self, run_id: str) -> None:
        """Begin another driver where the run was touched after the last one had read, and before its task ended."""
        del self._tasks[run_id]
        if run_id in self._touched_early and not self._stopped:
            self._touched_early.discard(run_id)
            self._spawn(run_id, self._revive(run_id))

    async def _drive(self, driver: Driver) -> None:
        """Drive the run to its end. After a bug, which is logged and counted, it is tried again from the store."""
        backoff, failed = Backoff(first=1.0, longest=60.0), False
        try:
            while True:
                try:
                    if failed:
                        await driver.reload()
                        failed = False
                    await driver.drive()
                    if driver.is_touched:
                        continue
                    return
                except Exception:  # the boundary of a run: a bug in one must not take down the others
                    wait = backoff.next()
                    self._services.metrics.loop_errors.labels("driver").inc()
                    log.exception("a run's driver failed; starting it again", run_id=driver.run.id, retry_in=wait)
                failed = True
                await asyncio.sleep(wait)
        finally:
            self._drivers.pop(driver.run.id, None)


def _in_flight_since(run: Run) -> datetime | None:
    """When the attempt that a killed server had in flight was begun; None where there was none."""
    last = [attempts[-1] for step in run.steps for attempts in (step.attempts, step.undo_attempts) if attempts]
    return min((attempt.started_at for attempt in last if attempt.status == "running"), default=None)
