"""Comparison of losses before and after a rollback.

Equal weights, batch and random numbers give equal losses, so a differing first loss shows unrestored state. Equal
gradient norms show that the losses are other numbers, such as running means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any, Mapping, Sequence

from trainmedic.job.reported_values import is_one_number, kept, number

COMPARED = 20  # Steps after a rollback whose losses are compared
FEWEST = 3
"""Compared losses that suffice."""
EXACT_KERNELS = 1e-5
"""84 times float32's machine epsilon (2^-23): MKL sums in another order if memory is aligned differently."""
COARSE_KERNELS = 2.0**-7
"""bfloat16's machine epsilon: kernels may add in any order (PyTorch's notes on reproducibility)."""
# A jump exceeds the largest earlier loss by six times their range and a quarter of the largest; after fewer than three
# losses, whose range means little, by four times the largest instead of the quarter.
_JUMP_SPREADS = 6.0
_JUMP_SHARE, _JUMP_SHARE_OF_FEW = 0.25, 4.0
_FEW_LOSSES = 3
_MOST_STEPS = 8192  # kept in memory
_SAVED_LOSSES = 512  # newest ones in a checkpoint, and as many changes
_NOT_REPORTED = "no loss was reported for these steps before"
_NO_LOSS = "no loss was reported since"
_FAULT_IN_COURSE = "the training went back because of a fault in its course, which need not come again"
_CHANGED_BY_COMMANDS = "commands changed the course after the checkpoint"
_OTHER_PROCESS = "an earlier process has trained the first of these steps, and its script may have been another"
_OTHER_NUMBER = (
    "not comparable: the gradients are as before and the reported losses are not, so the loop reports another number "
    "than the loss of the step, such as a running mean; report the loss itself"
)
_SAVED_GRADIENTS = 64  # steps in a checkpoint

Norms = Sequence[float]  # Norms of fixed parts of a step's gradients


# What is known of the training's course when the comparison begins; `torch.loss_course` makes it.
@dataclass(frozen=True)
class LossCourse:
    tolerance: float = EXACT_KERNELS  # Relative to the largest loss
    not_comparable: str = ""
    """Reason, or ""."""
    is_known: bool = True  # False if the batches may differ
    trouble_at: int | None = None
    """First untrusted step: then only the first loss, if earlier, must agree."""
    changed_at: int | None = None  # First step after a command that changes losses


class LossComparison:
    """Comparison after a rollback to ``step``. ``earlier_until``: last step of an earlier process."""

    def __init__(
        self,
        step: int,
        before: Mapping[int, float],
        course: LossCourse,
        gradients: Mapping[int, Norms] | None = None,
        earlier_until: int = 0,
    ) -> None:
        self.step = step
        self._course = course
        self._is_of_earlier_process = step < earlier_until
        self._gradients = dict(gradients or {})
        self._gradients_agree: dict[int, bool] = {}
        self._expected = {} if course.not_comparable else dict(before)
        self._finite = self._passed = 0
        self._trouble_at = trouble = self._first_untrusted_step()
        self._required = self._steps_that_must_agree()
        sound = [loss for at, loss in self._expected.items() if trouble is None or at < trouble]
        self._scale = max(map(abs, sound), default=0.0)  # a spike would make every difference small
        self.compared: list[int] = []
        self.different: dict[int, tuple[float, float]] = {}
        self.not_finite_at: int | None = None
        self._stopped_because = ""
        self._stopped_after = 0

    def _first_untrusted_step(self) -> int | None:
        steps = sorted(self._expected)
        losses = [self._expected[step] for step in steps]
        found = [step for at, step in enumerate(steps) if not math.isfinite(losses[at]) or _is_jump(losses, at)]
        known = [] if self._course.trouble_at is None else [self._course.trouble_at]
        return min(known + found, default=None)

    def _steps_that_must_agree(self) -> frozenset[int]:
        course, trouble, steps = self._course, self._trouble_at, sorted(self._expected)
        if not course.is_known or self._is_of_earlier_process:
            return frozenset()
        if trouble is not None:
            steps = [step for step in steps[:1] if step < trouble]
        return frozenset(step for step in steps if course.changed_at is None or step < course.changed_at)

    @property
    def is_complete(self) -> bool:
        return self._passed >= COMPARED or bool(self._find_problem(is_last=False))

    @property
    def has_enough(self) -> bool:
        return len(self.compared) >= FEWEST or not self._expected or bool(self._stopped_because)

    def add(self, step: int, loss: Any) -> None:
        now, before = number(loss), self._expected.get(step)
        if now is None or self.is_complete:
            return
        if not math.isfinite(now):
            self.not_finite_at = step
            return
        self._finite += 1
        if before is None or not math.isfinite(before) or self._is_after_stop(step):
            return
        self.compared.append(step)
        if abs(now - before) > self._course.tolerance * max(self._scale, abs(now)):
            self.different[step] = (before, now)

    def step_passed(self, step: int) -> None:
        self._passed = max(self._passed, step - self.step)

    def add_gradients(self, step: int, norms: Any) -> None:
        before = self._gradients.get(step)
        if before is None or self.is_complete or self._is_after_stop(step):
            return
        now = _read_norms(norms)
        limit = self._course.tolerance * max(map(abs, before), default=0.0)
        # Zero gradients, such as behind a layer initialized with zeros, prove nothing.
        self._gradients_agree[step] = (
            any(before)
            and len(now) == len(before)
            and all(
                abs(one - other) <= max(limit, self._course.tolerance * abs(other))
                for one, other in zip(now, before, strict=True)
            )
        )

    def _is_after_stop(self, step: int) -> bool:
        return bool(self._stopped_because) and step > self._stopped_after

    def _trains_as_before(self, step: int) -> bool | None:
        """Return whether gradients agree up to the first step at or after `step` that had any before the rollback.

        None until that step's are known again; False without such a step.
        """
        update = min((each for each in self._gradients if each >= step), default=None)
        if update is None or not all(agree for at, agree in self._gradients_agree.items() if at <= update):
            return False
        return True if update in self._gradients_agree else None

    def note_course_change(self, because: str, after: int = 0) -> None:
        """Stop comparing after step `after`: later losses change on purpose."""
        if not self._stopped_because:
            self._stopped_because, self._stopped_after = because, after

    @property
    def problem(self) -> str:
        """Why the rollback does not hold, "" if nothing shows that."""
        return self._find_problem(is_last=True)

    def _find_problem(self, is_last: bool) -> str:
        """Return `problem`; `is_last`: no other loss or gradient follows."""
        if self.not_finite_at is not None:
            after = self.not_finite_at - self.step
            return f"the loss of step {self.not_finite_at} is not a finite number, {after} step(s) after the checkpoint"
        for step in sorted(self._required & self.different.keys()):
            is_same = self._trains_as_before(step)
            if is_same or (is_same is None and not is_last):
                continue
            return self._difference_at(step)
        return ""

    def _difference_at(self, step: int) -> str:
        before, now = self.different[step]
        agreed = sum(each < step and each not in self.different for each in self.compared)
        first = ", the first that was compared" if step == self.compared[0] else ""
        earlier = f" after {agreed} that agree" if agreed else first
        return f"the loss of step {step} is {now:.8g}, and was {before:.8g} before{earlier}"

    @property
    def first_differs(self) -> bool:
        return bool(self.compared) and self.compared[0] in self.different

    def result(self, ended_because: str = "") -> dict[str, Any]:
        """Return ``verified.losses``."""
        course = self._course
        agreed = len(self.compared) - len(self.different)
        member: dict[str, Any] = {"compared": len(self.compared), "agreed": agreed, "finite": self._finite}
        if self.compared:
            member["tolerance"] = course.tolerance
        if course.not_comparable:
            member["why"] = f"not comparable: {course.not_comparable}"
        elif self.problem:
            member["why"] = self.problem
        elif self._required & self.different.keys():
            compared = len(self._gradients_agree)
            member["gradients"] = {"compared": compared, "agreed": sum(self._gradients_agree.values())}
            member["why"] = _OTHER_NUMBER
        elif self.different:
            member["why"] = self._why_allowed()
        elif self._stopped_because:
            member["why"] = self._stopped_because
        elif ended_because and not self.is_complete:
            member["why"] = ended_because
        elif not self.compared:
            member["why"] = _NOT_REPORTED if self._finite or not self._expected else _NO_LOSS
        return member

    def _why_allowed(self) -> str:
        first = min(self.different)
        if not self._course.is_known:
            why = "it is not known whether the loop draws the same batches again"
        elif self._course.changed_at is not None and first >= self._course.changed_at:
            why = _CHANGED_BY_COMMANDS
        elif self._is_of_earlier_process:
            why = _OTHER_PROCESS
        else:
            why = _FAULT_IN_COURSE
        return f"losses differ from step {first} on: {why}"


def _is_jump(losses: Sequence[float], at: int) -> bool:
    before = losses[:at]
    largest = max(before, default=0.0)
    if largest <= 0.0:
        return False  # such losses have no scale
    share = _JUMP_SHARE if len(before) >= _FEW_LOSSES else _JUMP_SHARE_OF_FEW
    return losses[at] - largest > _JUMP_SPREADS * (largest - min(before)) + share * largest


def _read_norms(norms: Any) -> list[float]:
    read: list[float] = []
    for each in norms:
        values = each.tolist() if hasattr(each, "tolist") else each
        read.extend(number(value) or 0.0 for value in (values if isinstance(values, list) else [values]))
    return read


class _NoComparison(LossComparison):
    def add(self, step: int, loss: Any) -> None:
        return

    def step_passed(self, step: int) -> None:
        return

    def add_gradients(self, step: int, norms: Any) -> None:
        return

    def note_course_change(self, because: str, after: int = 0) -> None:
        return


# Stands for a comparison before the first rollback.
NOTHING = _NoComparison(0, {}, LossCourse(not_comparable="there was no rollback"))


class LossLog:
    __slots__ = ("_changes", "_gradients", "_losses", "_resumed_at", "comparison", "until")

    def __init__(self) -> None:
        self.until = 0  # last step whose loss is needed
        self.comparison: LossComparison = NOTHING
        self._losses: dict[int, Any] = {}
        self._gradients: dict[int, Any] = {}
        self._changes: dict[int, int] = {}  # first step with another loss, by the command's step
        self._resumed_at = 0  # earlier processes trained the steps up to this one

    def expect_from(self, step: int) -> None:
        """Keep losses after a checkpoint at `step`, to which a rollback may return."""
        self.until = max(self.until, step + COMPARED)

    def note(self, step: int, loss: Any) -> None:
        """Take a loss. Tensors are copied on their device and read later."""
        if not is_one_number(loss):
            return
        self._losses[step] = value = kept(loss)
        if len(self._losses) > _MOST_STEPS:
            del self._losses[next(iter(self._losses))]
        comparison = self.comparison
        if not comparison.is_complete and step > comparison.step:
            comparison.add(step, value)

    def note_gradients(self, step: int, norms: Any) -> None:
        self._gradients[step] = norms
        if len(self._gradients) > _MOST_STEPS:
            del self._gradients[next(iter(self._gradients))]
        if step > self.comparison.step:
            self.comparison.add_gradients(step, norms)

    def note_course_change(self, step: int, because: str = _CHANGED_BY_COMMANDS, spares_next: bool = False) -> None:
        """Record that a command changes losses after `step`, with ``spares_next`` after the next."""
        first = step + 1 + spares_next
        self._changes[step] = min(first, self._changes.get(step, first))
        self.comparison.note_course_change(because, step + spares_next)

    def first_changed_step(self, after: int) -> int | None:
        return min((first for at, first in self._changes.items() if at > after), default=None)

    def go_back(self, step: int, course: LossCourse) -> LossComparison:
        """Forget what followed `step`, and return the comparison with it."""
        last = step + COMPARED
        before = {at: loss for at, loss in self._losses.items() if step < at <= last}
        read = {at: float("nan") if (value := number(loss)) is None else value for at, loss in before.items()}
        norms = {at: _read_norms(each) for at, each in self._gradients.items() if step < at <= last}
        self._losses = {at: loss for at, loss in self._losses.items() if at <= step}
        self._gradients = {at: each for at, each in self._gradients.items() if at <= step}
        self._changes = {at: first for at, first in self._changes.items() if at <= step}
        self.until = last
        self.comparison = LossComparison(step, read, course, norms, self._resumed_at)
        self._resumed_at = min(self._resumed_at, step)  # this process trains the following steps, and may repeat them
        return self.comparison

    def state(self) -> dict[str, Any]:
        start = max(len(self._losses) - _SAVED_LOSSES, 0)
        losses = {step: number(loss) for step, loss in islice(self._losses.items(), start, None)}
        self._losses.update(losses)  # read each tensor once
        newest = list(self._gradients.items())[-_SAVED_GRADIENTS:]
        gradients = {step: _read_norms(norms) for step, norms in newest}
        self._gradients.update(gradients)
        return {
            "losses": [list(pair) for pair in losses.items()],
            "gradients": [list(pair) for pair in gradients.items()],
            "changes": list(self._changes)[-_SAVED_LOSSES:],
            "changed_from": list(self._changes.values())[-_SAVED_LOSSES:],
        }

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        held = state or {"losses": [], "changes": []}
        self._losses = {int(at): loss for at, loss in held["losses"]}
        self._gradients = {int(at): norms for at, norms in held.get("gradients", ())}
        steps = [int(each) for each in held["changes"]]
        first_steps = held.get("changed_from", [each + 1 for each in steps])  # older checkpoints lack it
        self._changes = {at: int(first) for at, first in zip(steps, first_steps, strict=True)}
        self.until, self.comparison, self._resumed_at = step + COMPARED, NOTHING, step
