"""What commands have changed in a training, kept over rollbacks and restarts until it is undone.

A rollback brings back an old learning rate, a restart the script's own batch size; what a playbook has changed
is to outlive both. So each change is recorded with the command that made it, in a small file beside the
checkpoints. A value is the script's own times the factors of all changes in force: one that is undone leaves no
trace.

A change that kills its job must not be made again at each restart, or no restart would help. So a product of factors
beyond its bounds is refused, and dropped where an earlier release has recorded it (``change_bounds``). What no bound
can know, such as a batch that is too large for the memory, is on trial until the next checkpoint: where the job was
started twice without coming to one, the change is dropped (``change_trial``).

Who calls it: the integrations. Not here: making the change.
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
from trainmedic.job.parameters import LARGEST_LR_SCALE
from trainmedic.recovery.checkpoints import write_durably

log = logging.getLogger("trainmedic")

FILE = ".trainmedic-changes.json"
LEARNING_RATE = "learning_rate"
BATCH_SIZE = "batch_size"
ACCUMULATION = "accumulation"
AS_LOADED = "as the checkpoint was"
"""In place of a command's id: a factor of the checkpoint that training goes on from, where the record of the commands
that made it is lost."""
_SCALED = (LEARNING_RATE, BATCH_SIZE, ACCUMULATION)
_LARGEST_DENOMINATOR = 10_000  # a factor of 0.333… is meant as a third
_WORKERS, _WORKERS_PER_CPU = 16, 4  # the most that a command may start: these, or so many per CPU if that is more
SMALLEST_LR_SCALE = 1e-3
"""Times the script's own learning rate: at less a training stands still, and nothing is repaired by lowering it."""
LARGEST_GROWTH = 1000
"""Times the script's own batch or accumulation: a step that takes so much longer would never end to have it undone."""

_ROUNDING = 1 + 1e-9  # so that a tenth of a tenth of a tenth is a thousandth
WORKERS = "workers"
"""In place of a command's id: the number of workers that load data."""
_STARTS = 2


@dataclass(frozen=True)
class FactorBounds:
    """The bounds of one value. ``what`` names it; ``least`` and ``most`` bound the product of all factors in force."""

    what: str
    least: float
    most: float

    def check(self, factors: Mapping[str, float], added: float | None) -> None:
        """Raises Rejected where the product of `factors` is out of bounds, or the one that was ``added`` by itself."""
        for factor in (math.prod(factors.values()), *(() if added is None else (added,))):
            if not self._contain(factor):
                raise Rejected(
                    f"{self.what} would be {factor:g} times the script's own, and commands may make it "
                    f"{self.least:g} to {self.most:g} times of that"
                )

    def kept(self, factors: Mapping[str, float]) -> dict[str, float]:
        """The factors without those that take the product out of bounds, which are logged."""
        kept: dict[str, float] = {}
        for command_id, factor in factors.items():
            if self._contain(math.prod(kept.values()) * factor):
                kept[command_id] = factor
            else:
                log.warning(
                    "%s was scaled by %g, by command %s; that is out of bounds, and is not done again",
                    self.what,
                    factor,
                    command_id,
                )
        return kept

    def _contain(self, product: float) -> bool:
        return self.least <= product * _ROUNDING and product <= self.most * _ROUNDING


@dataclass(frozen=True)
class ChangeTrial:
    """The changes on trial, by command; none to begin with."""

    changes: frozenset[str] = frozenset()
    step: int = 0
    """The step after which the last of them was made."""
    starts: int = 0
    """How often the job was started again since."""

    @classmethod
    def of(cls, state: Any) -> ChangeTrial:
        """What `state` gave. What cannot be read is no trial."""
        try:
            return cls(frozenset(map(str, state["changes"])), int(state["step"]), int(state["starts"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()

    def state(self) -> Mapping[str, Any]:
        """The trial as plain JSON values."""
        return {**asdict(self), "changes": sorted(self.changes)}

    def with_changes(self, changes: AbstractSet[str], step: int) -> ChangeTrial:
        """The trial of these as well, made after ``step``. It begins anew."""
        return ChangeTrial(self.changes | changes, step) if changes else self

    def is_passed(self, step: int) -> bool:
        """Whether a checkpoint of ``step`` ends it."""
        return bool(self.changes) and step != self.step

    def started_again(self) -> ChangeTrial:
        return replace(self, starts=self.starts + 1)

    @property
    def is_failed(self) -> bool:
        """Whether the job has died too often meanwhile."""
        return self.starts >= _STARTS

    @property
    def failure(self) -> str:
        return (
            f"the job was started {self.starts} times and came to no checkpoint after what changed at step {self.step}"
        )


class AppliedChanges:
    """The changes of one training that are in force.

    ``directory`` holds the file; without one they end with the process, unless a checkpoint holds them (`state`,
    `restore`). ``writes`` is for the one rank that writes the file. ``largest_lr_scale`` is how many times the script's
    learning rate commands may make of it.
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
        # The factor of each command whose change is in force, in order, by the name of what is scaled.
        self._factors: dict[str, dict[str, float]] = {name: {} for name in _SCALED}
        self.workers: int | None = None
        self.workers_at_most = False
        self.skipped: list[list[int]] = []
        self._trial = ChangeTrial()
        self._is_new = True  # whether this process began the training, rather than resuming it
        self._is_complete = False  # whether what is recorded here is all that is in force

    def training_begins(self) -> None:
        """What is recorded by now is all that is in force: nothing is resumed any more."""
        self._is_complete = True

    def is_in_force(self, name: str, command_id: str) -> bool | None:
        """Whether the change of a command is in force; None where that is not known. Any thread may ask.

        The record is the truth of it, and not only a trace: what training works with is the script's own value times
        the recorded factors. Not known is it before training has begun, and where a factor's commands are lost.
        """
        factors = self._factors[name]
        if command_id in factors:
            return True
        return None if not self._is_complete or AS_LOADED in factors else False

    def scale(self, name: str) -> float:
        """The product of all factors in force."""
        return math.prod(self._factors[name].values())

    def factors(self, name: str) -> dict[str, float]:
        """A copy of the factors in force, by command."""
        return dict(self._factors[name])

    def with_factor(self, name: str, command_id: str, factor: float, undo_of: str | None = None) -> dict[str, float]:
        """The factors as they would be with one more, or without that of the command that it takes back.

        Where the change that a command takes back is not recorded here, the command counts as a change by itself in
        a resumed training, for the record may be lost. In a new training it counts for nothing, because the change
        was made to an earlier training of the same name. Raises Rejected where the result is out of bounds.
        """
        factors = dict(self._factors[name])
        if undo_of in factors:
            del factors[undo_of]
        elif undo_of is None or not self._is_new:
            factors[command_id] = factor
        self._bounds[name].check(factors, factor if undo_of is None else None)
        return factors

    def set_factors(self, name: str, factors: Mapping[str, float], step: int | None = None) -> None:
        """Record a change that was made after ``step``, from which on it is on trial."""
        if step is not None:
            self._trial = self._trial.with_changes(factors.keys() - self._factors[name].keys(), step)
        self._factors[name] = dict(factors)
        self.save()

    def set_workers(self, workers: int | None, step: int, at_most: bool = False) -> None:
        """Record how many workers load data. None means as many as in the script. With `at_most` a script that starts
        again with fewer workers keeps these."""
        self._trial = self._trial.with_changes({WORKERS} if workers is not None else set(), step)
        self.workers, self.workers_at_most = workers, at_most and workers is not None
        self.save()

    def workers_for(self, script: int) -> int:
        """Return how many workers load data in a training whose script has this many."""
        if self.workers is None:
            return script
        return min(self.workers, script) if self.workers_at_most else self.workers

    def checkpoint_written(self, step: int) -> None:
        """End the trial of what was changed: training has come to a checkpoint with it."""
        if self._trial.is_passed(step):
            self._trial = ChangeTrial()
            self.save()

    def save(self) -> None:
        """Write the file. Where that fails, training goes on without it."""
        if self._file is None or not self._writes:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._file, json.dumps(self.state()).encode())
        except OSError as error:
            log.warning("%s cannot be written; a restart will forget what was changed: %s", self._file, error)

    def state(self) -> dict[str, Any]:
        """All changes in force, as plain JSON values. The keys are those of the file; ``left_out`` holds `skipped`."""
        return {
            **self._factors,
            "workers": self.workers,
            "workers_at_most": self.workers_at_most,
            "left_out": self.skipped,
            "on_trial": self._trial.state(),
        }

    def went_back(self, step: int) -> None:
        """A rollback went back to ``step``, so that a later one is training that has gone on with what is on trial."""
        if self._trial.changes and step < self._trial.step:
            self._trial = replace(self._trial, step=step)
            self.save()

    def recall(self, otherwise: Mapping[str, Any] | None = None, step: int | None = None) -> bool:
        """After a restart, read the file, else take ``otherwise``, a checkpoint's `state`. True if either was there.

        ``step`` is that of the checkpoint that training goes on from. If it is a later one than that after which
        something was changed, training has come to a checkpoint with it.
        """
        self._is_new = False
        state = _read(self._file) or otherwise
        if state is not None:
            self.restore(state)
            if step is not None and step > self._trial.step:
                self._trial = ChangeTrial()
            self._start_trial_again()
        self._is_complete = True
        return state is not None

    def _start_trial_again(self) -> None:
        """The job was started again: drop the changes with which it has not come to a checkpoint in two starts."""
        if not self._trial.changes:
            return
        self._trial = self._trial.started_again()
        if self._trial.is_failed:
            for name, factors in self._factors.items():
                self._factors[name] = {key: value for key, value in factors.items() if key not in self._trial.changes}
            self.workers = None if WORKERS in self._trial.changes else self.workers
            log.warning("%s; they are not made again: %s", self._trial.failure, ", ".join(sorted(self._trial.changes)))
            self._trial = ChangeTrial()
        self.save()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave; what cannot be read changes nothing."""
        try:
            factors = {
                name: {str(command_id): float(factor) for command_id, factor in state[name].items()} for name in _SCALED
            }
            if not all(0 < factor < math.inf for by_command in factors.values() for factor in by_command.values()):
                raise ValueError("a factor is not a number above 0")
            workers = state["workers"]
            left_out = [[int(number) for number in span] for span in state["left_out"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.warning("what commands have changed before cannot be read, and is forgotten: %s", error)
            return
        self._factors = {name: self._bounds[name].kept(factors[name]) for name in _SCALED}
        self.skipped = left_out
        self.workers = workers if isinstance(workers, int) else None
        self.workers_at_most = state.get("workers_at_most") is True
        self._trial = ChangeTrial.of(state.get("on_trial"))

    def drop_earlier_run(self) -> None:
        """Overwrite the file of an earlier training, once a new training has a checkpoint.

        Until then that file is kept, so that a user who has only forgotten to resume has lost nothing.
        """
        if self._is_new and self._file is not None and self._file.exists():
            self.save()

    def forget(self) -> None:
        """Drop all changes, and delete the file, because training begins from nothing."""
        self._factors = {name: {} for name in _SCALED}
        self.workers, self.skipped, self._trial, self._is_new = None, [], ChangeTrial(), True
        self._is_complete = True
        if self._file is not None and self._writes:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s cannot be removed: %s", self._file, error)


def scaled_whole(base: int, factors: Mapping[str, float], name: str, round_down: bool = False) -> int:
    """`base` times the factors. Raises Rejected where that is not a whole number, unless it may be rounded, and where
    it is beyond all measure; ``name`` says in the reason what would be scaled.
    """
    exact = Fraction(base)
    for factor in factors.values():
        exact *= Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)
    if exact > base * LARGEST_GROWTH:
        raise Rejected(f"{name} would be more than {LARGEST_GROWTH} times what the script has")
    if exact >= 1 and (exact.denominator == 1 or round_down):
        return math.floor(exact)
    raise Rejected(f"{name} would be {float(exact):g}, which is not a whole number of 1 or more")


def check_workers(count: int) -> None:
    """Raises Rejected where so many workers of a data loader would keep the machine from working."""
    cpus = os.cpu_count() or 1
    most = max(_WORKERS, _WORKERS_PER_CPU * cpus)
    if count > most:
        raise Rejected(f"{count} workers would choke this machine, which has {cpus} CPUs: {most} at most")


def _read(file: Path | None) -> Mapping[str, Any] | None:
    if file is None:
        return None
    try:
        state = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be read: %s", file, error)
        return None
    return state if isinstance(state, dict) else None
