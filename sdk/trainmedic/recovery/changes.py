"""Changes by commands, kept over rollbacks and restarts until undone.

A value is the script's own times all active factors, so undoing leaves no trace.
"""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import AbstractSet, Any, Mapping

from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import LARGEST_LR_SCALE, DataloaderWorkers
from trainmedic.recovery.checkpoints import write_durably
from trainmedic.recovery.json_files import read_or_warn

log = logging.getLogger("trainmedic")

FILE = ".trainmedic-changes.json"
LEARNING_RATE = "learning_rate"
BATCH_SIZE = "batch_size"
ACCUMULATION = "accumulation"
AS_LOADED = "as the checkpoint was"  # in the place of a command ID, if only the loaded rate's factor is known
_SCALED = (LEARNING_RATE, BATCH_SIZE, ACCUMULATION)
_LARGEST_DENOMINATOR = 10_000  # 0.333… means a third
_WORKERS, _WORKERS_PER_CPU = 16, 4  # most workers that a command may set: the larger of 16 and 4 per CPU
SMALLEST_LR_SCALE = 1e-3  # multiple of the script's learning rate; below it training stands still
# Multiple of the script's batch size or accumulation; longer steps would end too late for the undo.
LARGEST_GROWTH = 1000

_ROUNDING = 1 + 1e-9  # so that 0.1 · 0.1 · 0.1 counts as 0.001
WORKERS = "workers"  # in the place of a command ID, for the data loader workers
_STARTS = 2  # without a checkpoint, until the changes on trial are dropped


@dataclass(frozen=True)
class FactorBounds:
    """Bounds for the product of ``what``'s active factors."""

    what: str  # for messages, such as "the learning rate"
    least: float
    most: float

    def check(self, factors: Mapping[str, float], added: float | None) -> None:
        """Raise Rejected if the product, or ``added`` alone, is out of bounds."""
        checked = [math.prod(factors.values())]
        if added is not None:
            checked.append(added)
        for factor in checked:
            if not self._allow(factor):
                raise Rejected(
                    f"{self.what} would be {factor:g} times the script's own; commands may set "
                    f"{self.least:g} to {self.most:g} times"
                )

    def drop_excessive(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Drop factors that move the product out of bounds."""
        allowed: dict[str, float] = {}
        for command_id, factor in factors.items():
            if self._allow(math.prod(allowed.values()) * factor):
                allowed[command_id] = factor
            else:
                log.warning(
                    "%s was scaled by %g, by command %s; that is out of bounds and is not reapplied",
                    self.what,
                    factor,
                    command_id,
                )
        return allowed

    def _allow(self, product: float) -> bool:
        return self.least <= product * _ROUNDING and product <= self.most * _ROUNDING


@dataclass(frozen=True)
class ChangeTrial:
    """Changes without a later checkpoint. They may crash the job, so its second start drops them."""

    changes: frozenset[str] = frozenset()  # IDs of commands, and WORKERS
    step: int = 0  # after which the last change was made
    starts: int = 0  # of the job since

    @classmethod
    def from_state(cls, state: Any) -> ChangeTrial:
        try:
            return cls(frozenset(map(str, state["changes"])), int(state["step"]), int(state["starts"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()

    def state(self) -> Mapping[str, Any]:
        return {**asdict(self), "changes": sorted(self.changes)}

    def with_changes(self, changes: AbstractSet[str], step: int) -> ChangeTrial:
        return ChangeTrial(self.changes | changes, step) if changes else self

    def is_passed(self, step: int) -> bool:
        # A checkpoint of the same step was written before the first step with the changes.
        return bool(self.changes) and step != self.step

    @property
    def failure(self) -> str:
        return (
            f"the job started {self.starts} times without reaching a checkpoint after the changes at step {self.step}"
        )


class AppliedChanges:
    """The active changes of one training.

    Args:
        directory: Directory of the file; None keeps changes in this process and in checkpoints only.
        writes: True on the one rank that writes the file.
        largest_lr_scale: Upper bound, times the script's own learning rate.
    """

    def __init__(
        self, directory: Path | None = None, writes: bool = True, largest_lr_scale: float = LARGEST_LR_SCALE
    ) -> None:
        self._file = directory / FILE if directory is not None else None
        self._writes = writes
        self._bounds = {
            LEARNING_RATE: FactorBounds("the learning rate", SMALLEST_LR_SCALE, largest_lr_scale),
            BATCH_SIZE: FactorBounds("the batch size", 1 / LARGEST_GROWTH, LARGEST_GROWTH),
            ACCUMULATION: FactorBounds("the accumulation", 1 / LARGEST_GROWTH, LARGEST_GROWTH),
        }
        # Active factors in order of their commands: {value: {command ID: factor}}.
        self._factors: dict[str, dict[str, float]] = {name: {} for name in _SCALED}
        self.workers: int | None = None  # set by a command; None for the script's own
        self.workers_at_most = False
        self.skipped: list[list[int]] = []  # batches: epoch, first, end
        self._trial = ChangeTrial()
        self._is_new = True  # this process began the training instead of resuming it
        self._is_complete = False  # the record here holds all active changes; False until training begins

    def training_begins(self) -> None:
        """Record that no `recall` follows."""
        self._is_complete = True

    def is_in_force(self, name: str, command_id: str) -> bool | None:
        """Return whether a change is active; None before training, or if commands are lost. Thread-safe."""
        factors = self._factors[name]
        if command_id in factors:
            return True
        return None if not self._is_complete or AS_LOADED in factors else False

    def scale(self, name: str) -> float:
        return math.prod(self._factors[name].values())

    def factors(self, name: str) -> dict[str, float]:
        return dict(self._factors[name])

    def with_factor(self, name: str, command_id: str, factor: float, undo_of: str | None = None) -> dict[str, float]:
        """Return the factors after one more command, or without ``undo_of``'s. Raises Rejected.

        If ``undo_of`` is not recorded, a resumed training applies ``factor``; a new one ignores it.
        """
        factors = dict(self._factors[name])
        if undo_of in factors:
            del factors[undo_of]
        elif undo_of is None or not self._is_new:  # an undo's factor is the inverse
            factors[command_id] = factor
        self._bounds[name].check(factors, factor if undo_of is None else None)
        return factors

    def set_factors(self, name: str, factors: Mapping[str, float], step: int | None = None) -> None:
        """Record the factors. A change made after ``step`` is on trial."""
        if step is not None:
            self._trial = self._trial.with_changes(factors.keys() - self._factors[name].keys(), step)
        self._factors[name] = dict(factors)
        self.save()

    def set_workers(self, workers: int | None, step: int, at_most: bool = False) -> None:
        """Record the data loader workers, None for the script's own.

        With ``at_most``, a restarted script keeps fewer.
        """
        self._trial = self._trial.with_changes({WORKERS} if workers is not None else set(), step)
        self.workers, self.workers_at_most = workers, at_most and workers is not None
        self.save()

    def workers_for(self, script: int) -> int:
        if self.workers is None:
            return script
        return min(self.workers, script) if self.workers_at_most else self.workers

    def checkpoint_written(self, step: int) -> None:
        if self._trial.is_passed(step):
            self._trial = ChangeTrial()
            self.save()

    def save(self) -> None:
        if self._file is None or not self._writes:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._file, json.dumps(self.state()).encode())
        except OSError as error:
            log.warning("%s cannot be written; a restart will forget the changes: %s", self._file, error)

    def state(self) -> dict[str, Any]:
        """Return all active changes; ``left_out`` holds `skipped`."""
        return {
            **self._factors,
            "workers": self.workers,
            "workers_at_most": self.workers_at_most,
            "left_out": self.skipped,
            "on_trial": self._trial.state(),
        }

    def went_back(self, step: int) -> None:
        """Record a rollback, so that the next later checkpoint ends the trial."""
        if self._trial.changes and step < self._trial.step:
            self._trial = replace(self._trial, step=step)
            self.save()

    def recall(self, otherwise: Mapping[str, Any] | None = None, step: int | None = None) -> bool:
        """Restore changes after a restart, from the file or a checkpoint's `state`; return whether either existed.

        ``step``: the loaded checkpoint's, which may end the trial.
        """
        self._is_new = False
        state = read_or_warn(self._file, _as_object, None, "%s cannot be read: %s") or otherwise
        if state is not None:
            self.restore(state)
            if step is not None and step > self._trial.step:
                self._trial = ChangeTrial()
            self._count_start()
        self._is_complete = True
        return state is not None

    def _count_start(self) -> None:
        """Drop the changes on trial at the second start without a checkpoint."""
        if not self._trial.changes:
            return
        self._trial = replace(self._trial, starts=self._trial.starts + 1)
        if self._trial.starts >= _STARTS:
            for name, factors in self._factors.items():
                self._factors[name] = {key: value for key, value in factors.items() if key not in self._trial.changes}
            self.workers = None if WORKERS in self._trial.changes else self.workers
            log.warning(
                "%s; not reapplying these changes: %s", self._trial.failure, ", ".join(sorted(self._trial.changes))
            )
            self._trial = ChangeTrial()
        self.save()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`'s output, unless invalid."""
        try:
            factors = {
                name: {str(command_id): float(factor) for command_id, factor in state[name].items()} for name in _SCALED
            }
            if not all(0 < factor < math.inf for by_command in factors.values() for factor in by_command.values()):
                raise ValueError("a factor is not a number above 0")
            workers = state["workers"]
            left_out = [[int(number) for number in span] for span in state["left_out"]]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("cannot read earlier changes by commands; ignoring them: %s", error)
            return
        self._factors = {name: self._bounds[name].drop_excessive(factors[name]) for name in _SCALED}
        self.skipped = left_out
        self.workers = workers if isinstance(workers, int) else None
        self.workers_at_most = state.get("workers_at_most") is True
        self._trial = ChangeTrial.from_state(state.get("on_trial"))

    def drop_earlier_run(self) -> None:
        """Overwrite an earlier training's file, from which the user may have resumed until now."""
        if self._is_new and self._file is not None and self._file.exists():
            self.save()

    def forget(self) -> None:
        self._factors = {name: {} for name in _SCALED}
        self.workers, self.skipped, self._trial, self._is_new = None, [], ChangeTrial(), True
        self._is_complete = True
        if self._file is not None and self._writes:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s cannot be removed: %s", self._file, error)


def scaled_whole(base: int, factors: Mapping[str, float], name: str, round_down: bool = False) -> int:
    """Return ``base`` times the factors; ``round_down`` allows a fraction.

    Raises Rejected if not whole, below 1 or above `LARGEST_GROWTH` times ``base``.
    """
    exact = Fraction(base)
    for factor in factors.values():
        exact *= Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)
    if exact > base * LARGEST_GROWTH:
        raise Rejected(f"{name} would be more than {LARGEST_GROWTH} times what the script has")
    if exact >= 1 and (exact.denominator == 1 or round_down):
        return math.floor(exact)
    raise Rejected(f"{name} would be {float(exact):g}, which is not a whole number of 1 or more")


def agreed_workers(command: JobCommand, present: int) -> int:
    """Return each data loader's workers, agreed by all ranks; ``present`` is this rank's number.

    Raises Rejected on all ranks. With ``at_most`` all must have the same number.
    """
    parameters = command.parameters
    assert isinstance(parameters, DataloaderWorkers)
    if parameters.at_most is not None:
        counts = sorted(set(command.group.poll(present).values()))
        if len(counts) > 1:
            raise Rejected(f"the ranks have different numbers of workers ({', '.join(map(str, counts))}); set a count")
    count = parameters.wanted(present)
    check_workers(count)
    return count


def check_workers(count: int) -> None:
    """Raise Rejected if so many would overload this machine."""
    cpus = os.cpu_count() or 1
    most = max(_WORKERS, _WORKERS_PER_CPU * cpus)
    if count > most:
        raise Rejected(f"{count} workers are too many for {cpus} CPUs; use at most {most}")


def _as_object(state: Any) -> Mapping[str, Any] | None:
    return state if isinstance(state, dict) else None
