"""Drivers of all runs: start, touch, and resumption after a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from datetime import datetime, timedelta
from typing import Any

from trainmedic.wire.backoff import Backoff
from trainmedic_core import duration
from trainmedic_server import errors, telemetry
from trainmedic_server.domain.run import Decision, Run
from trainmedic_server.engine import approval_steps, claims, group_members, plan
from trainmedic_server.engine.admission_changes import StartedRun
from trainmedic_server.engine.driver import Driver
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.engine.looking import Sight
from trainmedic_server.engine.plan_values import OutsideState, RunDraft, RunPlan
from trainmedic_server.engine.recorder import RunSnapshot
from trainmedic_server.ports.ending import end_tasks
from trainmedic_server.ports.playbooks import CompiledPlaybook

_MOST_PLAYBOOKS_READ = 100  # Cached playbook versions that are no longer loaded
_LAST_COMMIT_SECONDS = 1.0  # Time at shutdown to take back unstarted attempts

log = telemetry.logger(__name__)


class Workers:
    """One task for each run that is open or has a due undo."""

    def __init__(self, services: EngineServices) -> None:
        self._services = services
        self._drivers: dict[str, Driver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._touched_early: set[str] = set()  # while their driver was being loaded
        self._awaited: dict[str, asyncio.Future[Driver | None]] = {}  # done once that driver is loaded, or needless
        self._playbooks_read: dict[tuple[str, str], CompiledPlaybook] = {}  # by name and version
        self._stopped = False

    def start(self, started: StartedRun, outside: OutsideState | None = None) -> None:
        """`outside` is the parent's for a member of a group."""
        run, outside = started.run, outside or OutsideState((started.alert,))
        self._services.metrics.open_runs.inc()
        self._services.metrics.show_run(None, run)
        claim = claims.at_start(run, self._services.actions)
        if not self._services.locks.try_acquire(run.id, claim):
            self._services.locks.wait(run.id, claim)  # queue before runs that are admitted later
        received_at = started.alert.first_heard_at
        self._launch(Driver(run, started.playbook, outside, self._services, received_at, started.then))

    def touch(self, run_ids: Iterable[str]) -> None:
        """Make the drivers of these runs reload; closed runs get a new one."""
        for run_id in run_ids:
            driver = self._drivers.get(run_id)
            if driver is not None:
                driver.touch()
            elif run_id in self._tasks:
                self._touched_early.add(run_id)
            else:
                self._spawn(run_id, self._revive(run_id))

    def touch_all(self) -> None:
        self.touch(list(self._drivers))

    async def wait_until_planned(self, run_id: str, at_most: float) -> None:
        """Return once the driver has planned with all touches, or after `at_most` seconds."""
        try:
            async with asyncio.timeout(at_most):
                driver = self._drivers.get(run_id) or await self._next_driver(run_id)
                if driver is not None:
                    await driver.wait_until_planned()
        except TimeoutError:
            return

    async def recover(self, down_for: timedelta) -> None:
        """Resume open runs and due undos of an earlier process.

        Runs that have begun take their targets first, parents come after their members.
        """
        unfinished = await self._services.store.transact(lambda tx: tx.unfinished())
        unfinished.sort(
            key=lambda run: (run.is_group, run.waiting_on == "target", _in_flight_since(run) or run.created_at, run.id)
        )
        snapshots = await asyncio.gather(*(self._services.recorder.snapshot(run.id) for run in unfinished))
        for snapshot in snapshots:
            if snapshot is not None:
                self._services.metrics.open_runs.inc(snapshot.run.is_open)
                self._services.metrics.show_run(None, snapshot.run)
                await self._recover_run(snapshot, down_for)
        if unfinished:
            log.info("resumed unfinished runs", count=len(unfinished), down_for=duration.write(down_for))

    async def stop(self) -> None:
        self._stopped, drivers = True, list(self._drivers.values())
        await end_tasks(self._tasks.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_COMMIT_SECONDS):
                await asyncio.gather(*(self._take_back(driver) for driver in drivers))

    async def _take_back(self, driver: Driver) -> None:
        try:
            await driver.take_back_unbegun()
        except Exception:  # no caller is left, and the others must not fail too
            log.exception("cannot take back unstarted attempt", run_id=driver.run.id)

    async def _recover_run(self, snapshot: RunSnapshot, down_for: timedelta) -> None:  # closes it if it cannot continue
        run, playbook = snapshot.run, None
        services = self._services
        outside = OutsideState(snapshot.alerts, snapshot.orders)
        outside = outside.with_switches(services.controls(), services.pause_of(run))
        try:
            playbook = await self.playbook_of(run)
        except errors.StoreUnavailable:
            raise
        except errors.TrainmedicError as error:
            if run.is_open:
                log.error("cannot continue run", run_id=run.id, why=str(error))
                run = await self._close(run, plan.fail_unreadable(self._draft(run, outside, None), str(error)))
        draft = self._draft(run, outside, playbook)
        if run.is_open and run.is_group and not run.is_limited:
            draft.group = await services.store.transact(lambda tx: group_members.read_progress(tx, run.id))
        reason = self._why_stale(draft, down_for) if run.is_open else None
        if reason is not None:
            run = await self._close(run, plan.cancel_or_not_start(draft, reason, Decision.STALE))
            self._services.metrics.decisions.labels(run.playbook, str(Decision.STALE)).inc()
        if run.is_open or run.owes_undo:
            self._launch(Driver(run, playbook, outside, self._services, None))

    async def _close(self, run: Run, closing: RunPlan) -> Run:
        await self._services.recorder.record(closing.run, run, closing.events)
        self._services.count_closed(closing.run)
        self._services.metrics.show_run(run, closing.run)
        self._services.group_news.tell(closing.run, run)
        return closing.run

    def _draft(self, run: Run, outside: OutsideState, playbook: CompiledPlaybook | None) -> RunDraft:
        return RunDraft(run, outside, self._services.planning_context(playbook), self._services.clock.now())

    def _why_stale(self, draft: RunDraft, down_for: timedelta) -> str | None:
        """Return why a run must not act after a downtime, or None.

        A run that has acted or waits in a step continues after a downtime up to the maximum age.
        """
        if approval_steps.is_rejected(draft) or draft.run.is_limited:
            return None
        limit = self._services.limits.max_age
        if down_for > limit:
            down = duration.write_rounded(down_for)
            return f"the server was down for up to {down}, over the maximum age of {duration.write(limit)}"
        return None if plan.is_under_way(draft) else plan.why_stale(draft)

    async def playbook_of(self, run: Run) -> CompiledPlaybook:
        """Return the run's version of its playbook. Raises NotFound, PlaybookError, StoreUnavailable."""
        loaded = self._services.catalog.get(run.playbook)
        if loaded is not None and loaded.version == run.version:
            return loaded
        text = await self._services.store.transact(lambda tx: tx.playbook_text(run.playbook, run.version))
        if text is None:
            raise errors.NotFound(f"the text of playbook {run.playbook}, version {run.version}, is not in the store")
        return self._services.catalog.compile(text, f"{run.playbook}@{run.version[:12]}")

    async def playbook_for_reading(self, run: Run) -> CompiledPlaybook | None:
        """Return the cached `playbook_of`; None if unreadable. Raises StoreUnavailable."""
        key = (run.playbook, run.version)
        if key not in self._playbooks_read:
            try:
                playbook = await self.playbook_of(run)
            except errors.StoreUnavailable:
                raise
            except errors.TrainmedicError:
                return None
            if len(self._playbooks_read) >= _MOST_PLAYBOOKS_READ:
                self._playbooks_read.clear()
            self._playbooks_read[key] = playbook
        return self._playbooks_read[key]

    def snapshot_of(self, run_id: str) -> RunSnapshot | None:
        driver = self._drivers.get(run_id)
        return driver.snapshot if driver is not None else None

    def sight(self, run_id: str) -> Sight | None:
        driver = self._drivers.get(run_id)
        return driver.sight if driver is not None else None

    async def _revive(self, run_id: str) -> None:
        """Drive a closed run again: an undo may be due."""
        snapshot = await self._services.recorder.snapshot(run_id)
        if snapshot is None or not (snapshot.run.steps or snapshot.run.is_group):
            self._report_driver(run_id, None)
            return
        outside = OutsideState(snapshot.alerts, snapshot.orders)
        driver = self._drivers[run_id] = Driver(snapshot.run, None, outside, self._services, None)
        if snapshot.run.is_group or run_id in self._touched_early:
            # It was touched during the read, so the snapshot may be outdated. A parent notifies its members.
            self._touched_early.discard(run_id)
            driver.touch()
        self._report_driver(run_id, driver)
        await self._drive(driver)

    async def _next_driver(self, run_id: str) -> Driver | None:
        if run_id not in self._tasks:
            return None
        begun = self._awaited.setdefault(run_id, asyncio.get_running_loop().create_future())
        return await asyncio.shield(begun)

    def _report_driver(self, run_id: str, driver: Driver | None) -> None:
        begun = self._awaited.pop(run_id, None)
        if begun is not None:
            begun.set_result(driver)

    def _launch(self, driver: Driver) -> None:
        self._drivers[driver.run.id] = driver
        self._spawn(driver.run.id, self._drive(driver))

    def _spawn(self, run_id: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[run_id] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._on_task_end(run_id))

    def _on_task_end(self, run_id: str) -> None:
        del self._tasks[run_id]
        if run_id in self._touched_early and not self._stopped:
            self._touched_early.discard(run_id)
            self._spawn(run_id, self._revive(run_id))

    async def _drive(self, driver: Driver) -> None:
        """Drive the run to its end. Log and count bugs, then retry from the store."""
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
                except Exception:  # a bug in one run must not affect the others
                    wait = backoff.next()
                    self._services.metrics.loop_errors.labels("driver").inc()
                    log.exception("run driver failed; restarting it", run_id=driver.run.id, retry_in=wait)
                failed = True
                await asyncio.sleep(wait)
        finally:
            self._drivers.pop(driver.run.id, None)


def _in_flight_since(run: Run) -> datetime | None:
    last = [attempts[-1] for step in run.steps for attempts in (step.attempts, step.undo_attempts) if attempts]
    return min((attempt.started_at for attempt in last if attempt.status == "running"), default=None)
