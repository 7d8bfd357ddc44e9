"""Restarts of a training loop after a command or a crash.

A handler that needs one passes a `LoopRestart` to `LoopRestarter.request` and ends the loop; `run` restarts it.

- The next older checkpoint replaces a damaged one.
- After an exception, the loop restarts from the newest one, a limited number of times.
- A hanging loop is interrupted for a feasible rollback.
- With several ranks the launcher handles crashes and hangs, because others wait in a collective.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Callable, TypeVar

from trainmedic.client import Medic
from trainmedic.errors import Interrupted, Refusal, Rejected, described
from trainmedic.job.group import Group
from trainmedic.job.interrupt import Interrupter
from trainmedic.job.parameters import Rollback
from trainmedic.job.progress import REPAIR, Window
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.loop_restart import DamagedCheckpoint, LoopRestart
from trainmedic.recovery.rollback_budget import LIMIT
from trainmedic.wire.envelope import utc_now

log = logging.getLogger("trainmedic")

Result = TypeVar("Result")


@dataclass(frozen=True)
class RestartLimits:
    """Limits for a loop of one rank."""

    retries: int = 3  # after crashes without progress
    delay: float = 10.0  # seconds from a crash to the restart
    rollbacks: int | None = LIMIT  # without progress; None for no limit


def require_on_all_ranks(group: Group, checkpoint: SavedCheckpoint, is_there: Callable[[Path], bool]) -> None:
    """Raise Rejected on all ranks if one does not see the checkpoint. Every rank calls it."""
    seen_by = group.poll(is_there(checkpoint.path))
    unseen = [str(rank) for rank in range(group.world_size) if not seen_by.get(rank)]
    if unseen:
        raise Rejected(f"{checkpoint.name} is missing or incomplete as seen from rank {', '.join(unseen)}")


class LoopRestarter:
    """Runs and restarts one training's loop.

    ``newest`` returns the checkpoint after a crash, ``choose`` a rollback's. The latter raises Rejected, also in the
    interrupter's thread.
    """

    def __init__(
        self,
        medic: Medic,
        newest: Callable[[], Path | None],
        choose: Callable[[Rollback], object],
        limits: RestartLimits,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._medic = medic
        self._newest = newest
        self._choose = choose
        self._limits = limits
        self._sleep = sleep
        self._now = now
        self._interrupter: Interrupter | None = None
        self._requested: LoopRestart | None = None  # once the present loop has ended
        self.starting: LoopRestart | None = None  # the present loop's; None for the first loop
        self._has_loaded = False  # the present loop
        self._has_stepped = False  # the present loop
        self._may_restart = True  # False once a command has stopped the job
        self._failures = 0  # since the last progress
        self._furthest_step = -1  # -1 before the first step; a crash then ends the training
        self._window: Window | None = None  # from a request or failure to the restarted loop's first step

    @property
    def is_requested(self) -> bool:
        return self._requested is not None

    def request(self, restart: LoopRestart) -> bool:
        """Request a restart for a command; the caller must then end the loop.

        False if it was answered ``failed``: the loop must continue.
        """
        assert restart.command is not None
        if self._requested is not None or not self._may_restart:
            busy = "the training loop is about to restart for another command"
            restart.command.failed(busy if self._may_restart else "the job was told to stop")
            return False
        restart.command.later()
        self._requested = restart
        self._enter_window()
        return True

    def note_loaded(self) -> None:
        self._has_loaded = True

    def stepped(self, step: int) -> LoopRestart | None:
        """Record a step. After a restart's first step, return it, so that its command is answered."""
        if step > self._furthest_step:
            self._furthest_step, self._failures = step, 0
        if self._has_stepped:
            return None
        self._has_stepped = True
        self._leave_window()
        return self.starting

    def arm(self) -> None:
        if self._interrupter is not None:
            self._interrupter.arm()

    def disarm(self) -> None:
        if self._interrupter is not None:
            self._interrupter.disarm()

    def stop(self) -> None:
        self._may_restart = False
        if self._requested is not None:
            self._fail(self._requested, "the job was told to stop before the training loop could restart")
            self._requested = None
        self._leave_window()

    def run(self, attempt: Callable[[LoopRestart | None], Result]) -> Result:
        """Call `attempt` until it ends without a requested restart."""
        if self._medic.world_size == 1:
            self._interrupter = Interrupter(self._can_command_end_hang, lambda: self._medic.stall().is_hang)
            if self._interrupter.works:
                self._medic.on_arrival = self._interrupter.check_for_hang
        try:
            while True:
                self._has_loaded = self._has_stepped = False
                try:
                    result = attempt(self.starting)
                except Interrupted as interruption:
                    self.starting = self._after_interruption(interruption)
                except DamagedCheckpoint as damage:
                    self.disarm()
                    self.starting = self._after_damage(damage)
                except Exception as error:  # any error of the user's loop; raised again without a restart
                    self.disarm()
                    self.starting = self._after_failure(error)
                else:
                    self.disarm()
                    if not self._has_stepped:
                        self._fail(self.starting, "training ended before the restarted loop completed a step")
                    if self._requested is None:
                        return result
                    self.starting, self._requested = self._requested, None
        finally:
            self._leave_window()
            if self._interrupter is not None:
                self._medic.on_arrival = None
                self._interrupter.close()
                self._interrupter = None

    def _can_command_end_hang(self) -> bool:
        """Return whether a feasible rollback waits. Interrupter's thread only."""
        for command in self._medic.unanswered():
            if isinstance(command.parameters, Rollback) and not command.is_deferred:
                try:
                    self._choose(command.parameters)
                except Refusal:
                    continue
                return True
        return False

    def _after_interruption(self, interruption: Interrupted) -> LoopRestart:
        self.disarm()
        log.error("%s: the training loop hung and was interrupted", self._medic.job)
        _free_frames(interruption)
        self._medic.commands(self._medic.step or 0)  # the waiting rollback's handler requests the restart
        requested, self._requested = self._requested, None
        if requested is None:
            return self._after_failure(interruption)
        if not self._has_stepped:
            self._fail(self.starting, "the restarted loop hung before it completed a step")
        return requested

    def _after_damage(self, damage: DamagedCheckpoint) -> LoopRestart:
        damaged, newest = self.starting, self._newest()
        assert damaged is not None
        log.error("%s: %s", self._medic.job, damage)
        self._enter_window()
        if damaged.others:
            instead = damaged.to_next_best(str(damage))
        elif newest is None or damaged.is_rollback:
            self._fail(damaged, f"{damage}; there is no older one to use instead; the training ends")
            raise damage
        else:
            self._fail(damaged, str(damage))
            instead = LoopRestart(newest, settings=damaged.previous)
        _free_frames(damage)
        return instead

    def _after_failure(self, error: BaseException) -> LoopRestart:
        reason = described(error)
        requested, self._requested = self._requested, None
        self._fail(requested, f"the training loop crashed before it could restart: {reason}")
        self._failures += 1
        starting = self.starting if not self._has_stepped else None
        if not self._may_restart or self._medic.world_size > 1:
            self._fail(starting, reason)
            raise error
        if starting is not None and self._failures > self._limits.retries:
            if starting.others and not self._has_loaded:
                self._failures = 0
                log.error("%s: %s cannot be loaded: %s", self._medic.job, starting.checkpoint, reason)
                _free_frames(error)
                return starting.to_next_best(f"{starting.checkpoint.name} cannot be loaded: {reason}")
            self._fail(starting, f"the training loop did not restart: {reason}")
            return self._after_last_retry(starting, error)
        if starting is None:
            starting = self._after_crash(error)
        _free_frames(error)
        self._enter_window()
        self._sleep(self._limits.delay)
        return self._without_expired_command(starting)

    def _after_last_retry(self, starting: LoopRestart, error: BaseException) -> LoopRestart:
        checkpoint, self._failures = self._newest(), 0
        if starting.settings:  # of the framework, changed by the command
            log.error("%s: continuing with the former settings", self._medic.job)
            return LoopRestart(starting.checkpoint, settings=starting.previous)
        if starting.command is None or checkpoint is None or checkpoint == starting.checkpoint:
            raise error
        log.error(
            "%s: continuing from %s, because the loop does not start from %s",
            self._medic.job,
            checkpoint,
            starting.checkpoint,
        )
        return LoopRestart(checkpoint)

    def _after_crash(self, error: BaseException) -> LoopRestart:
        checkpoint = self._newest()
        if checkpoint is None or self._failures > self._limits.retries or self._furthest_step < 0:
            raise error
        log.error(
            "%s: the training loop crashed and starts again from %s, try %d of %d",
            self._medic.job,
            checkpoint,
            self._failures,
            self._limits.retries,
            exc_info=error,
        )
        return LoopRestart(checkpoint)

    def _without_expired_command(self, starting: LoopRestart) -> LoopRestart:
        command = starting.command
        if command is None or self._now() < command.expires_at:
            return starting
        self._fail(starting, "it expired before the training loop restarted")
        return LoopRestart(self._newest() or starting.checkpoint, settings=starting.previous)

    def _fail(self, restart: LoopRestart | None, reason: str) -> None:
        if restart is not None and restart.command is not None and not restart.command.is_answered:
            restart.command.failed(reason)

    def _enter_window(self) -> None:
        if self._window is None:
            self._window = self._medic.window(REPAIR).__enter__()

    def _leave_window(self) -> None:
        if self._window is not None:
            self._window.__exit__(None, None, None)
            self._window = None


def _free_frames(error: BaseException) -> None:
    # The failed loop's frames hold its objects, such as GPU tensors.
    error.__traceback__ = None
    gc.collect()
