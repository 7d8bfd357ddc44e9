"""Losses by step, and the comparison of those that come again after a rollback with those of before.

The same weights, the same batch and the same random numbers give the same loss. So a first loss that differs shows
state that did not go back. The log holds the losses of the steps after each checkpoint, because a rollback goes to
nothing else. Pure: not here is when losses are noted (``trainmedic.torch.boundary``) and the answer
(``trainmedic.torch.verification``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any, Mapping, Sequence

from trainmedic.job.reported_values import kept, number

COMPARED = 20
"""Steps after a rollback whose losses are compared."""
FEWEST = 3
"""Compared losses with which a slow training answers before all are there."""
EXACT_KERNELS = 1e-5
"""Tolerance on processors, as a share of the loss: 84 times float32's machine epsilon (2^-23). Libraries such as MKL
may sum in another order when memory is aligned otherwise."""
COARSE_KERNELS = 2.0**-7
"""Tolerance on accelerators and in half precision: bfloat16's machine epsilon. PyTorch's notes on reproducibility list
kernels there that add in any order, so results differ by rounding."""
_JUMP_SPREADS = 6.0
"""A loss beyond those before it by so many times their range, and by a quarter of the largest, is a jump."""
_JUMP_SHARE, _JUMP_SHARE_OF_FEW = 0.25, 4.0
_FEW = 3
"""Losses below which their range says little, so that a jump is five times the largest."""
_LONGEST = 8192
_CARRIED = 512
_NOT_REPORTED = "no loss was reported for these steps before"
_NO_LOSS = "no loss was reported since"
_TROUBLE = "the training went back because of a fault in its course, which need not come again"
_CHANGED = "commands changed the course after the checkpoint"


@dataclass(frozen=True)
class LossCourse:
    """What is known of the course after a checkpoint, and so which of its losses come again."""

    tolerance: float = EXACT_KERNELS
    not_comparable: str = ""
    """Why no loss comes again; empty where they do."""
    is_known: bool = True
    """Whether the batches are known to be those of before. If not, other losses are told and are no failure."""
    trouble_at: int | None = None
    """The first step that was not trusted; None where there was no fault. Only the first loss has to agree then."""
    changed_at: int | None = None
    """The first step whose loss a command has changed; None without one."""


class LossComparison:
    """The losses after a rollback to `step`, held against those that were reported before."""

    def __init__(self, step: int, before: Mapping[int, float], course: LossCourse) -> None:
        self.step = step
        self._course = course
        self._expected = {} if course.not_comparable else dict(before)
        self._finite = self._passed = 0
        self._trouble_at = trouble = self._find_trouble()
        self._required = self._binding_steps()
        sound = [loss for at, loss in self._expected.items() if trouble is None or at < trouble]
        self._scale = max(map(abs, sound), default=0.0)  # a spike would make every difference small
        self.compared: list[int] = []
        """The steps whose losses were compared."""
        self.different: dict[int, tuple[float, float]] = {}
        """Those that differ: by step the loss before and now."""
        self.not_finite_at: int | None = None
        self._frozen_because = ""

    def _find_trouble(self) -> int | None:
        """The first step that is not to be trusted: as the course says, not finite, or a jump."""
        steps = sorted(self._expected)
        losses = [self._expected[step] for step in steps]
        found = [step for at, step in enumerate(steps) if not math.isfinite(losses[at]) or _is_jump(losses, at)]
        known = [] if self._course.trouble_at is None else [self._course.trouble_at]
        return min(known + found, default=None)

    def _binding_steps(self) -> frozenset[int]:
        """The steps whose losses have to agree."""
        course, trouble, steps = self._course, self._trouble_at, sorted(self._expected)
        if not course.is_known:
            return frozenset()
        if trouble is not None:
            steps = [step for step in steps[:1] if step < trouble]
        return frozenset(step for step in steps if course.changed_at is None or step < course.changed_at)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come."""
        return self._passed >= COMPARED or bool(self.problem)

    @property
    def has_enough(self) -> bool:
        """Whether an answer that has to be given now may rest on what was compared."""
        return len(self.compared) >= FEWEST or not self._expected

    def add(self, step: int, loss: Any) -> None:
        """Take the loss of a step that was trained after the rollback."""
        now, before = number(loss), self._expected.get(step)
        if now is None or self.is_complete:
            return
        if not math.isfinite(now):
            self.not_finite_at = step
            return
        self._finite += 1
        if before is None or not math.isfinite(before) or self._frozen_because:
            return
        self.compared.append(step)
        if abs(now - before) > self._course.tolerance * max(self._scale, abs(now)):
            self.different[step] = (before, now)

    def step_passed(self, step: int) -> None:
        """Note that so many steps were trained, with or without a loss."""
        self._passed = max(self._passed, step - self.step)

    def course_changes(self, because: str) -> None:
        """Stop comparing: from here on other losses come on purpose. They must still be finite."""
        self._frozen_because = self._frozen_because or because

    @property
    def problem(self) -> str:
        """What shows that the rollback does not hold; empty where nothing does."""
        if self.not_finite_at is not None:
            after = self.not_finite_at - self.step
            return f"the loss of step {self.not_finite_at} is not a finite number, {after} step(s) after the checkpoint"
        for step in sorted(self._required & self.different.keys()):
            before, now = self.different[step]
            return f"the loss of step {step} is {now:.8g}, and was {before:.8g} with the same weights and batches"
        return ""

    def told(self, ended_because: str = "") -> dict[str, Any]:
        """Return the member ``losses`` of ``verified``. ``ended_because`` says why there were no more."""
        course = self._course
        agreed = len(self.compared) - len(self.different)
        member: dict[str, Any] = {"compared": len(self.compared), "agreed": agreed, "finite": self._finite}
        if self.compared:
            member["tolerance"] = course.tolerance
        if course.not_comparable:
            member["why"] = f"not comparable: {course.not_comparable}"
        elif self.problem:
            member["why"] = self.problem
        elif self.different:
            member["why"] = self._why_allowed()
        elif self._frozen_because:
            member["why"] = self._frozen_because
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
            why = _CHANGED
        else:
            why = _TROUBLE
        return f"from step {first} on other losses come: {why}"


def _is_jump(losses: Sequence[float], at: int) -> bool:
    """Return whether the loss at that index is far above all before it, which are finite."""
    before = losses[:at]
    largest = max(before, default=0.0)
    if largest <= 0.0:
        return False  # such losses have no scale to go by
    share = _JUMP_SHARE if len(before) >= _FEW else _JUMP_SHARE_OF_FEW
    return losses[at] - largest > _JUMP_SPREADS * (largest - min(before)) + share * largest


class _NoComparison(LossComparison):
    """The comparison of a training that has not gone back. It takes nothing, because all trainings share it."""

    def add(self, step: int, loss: Any) -> None:
        return

    def step_passed(self, step: int) -> None:
        return

    def course_changes(self, because: str) -> None:
        return


NOTHING = _NoComparison(0, {}, LossCourse(not_comparable="there was no rollback"))


class LossLog:
    """Losses of one course of training. For its training thread."""

    __slots__ = ("_changes", "_losses", "comparison", "until")

    def __init__(self) -> None:
        self.until = 0
        """The last step whose loss is to be noted."""
        self.comparison: LossComparison = NOTHING
        """The last one that `go_back` began."""
        self._losses: dict[int, Any] = {}
        self._changes: list[int] = []

    def expect_from(self, step: int) -> None:
        """Note the losses that follow, because a rollback may go to that step."""
        self.until = max(self.until, step + COMPARED)

    def note(self, step: int, loss: Any) -> None:
        """Take the loss of a step. A tensor is copied on its device and read later."""
        if loss is None:
            return
        self._losses[step] = value = kept(loss)
        if len(self._losses) > _LONGEST:
            del self._losses[next(iter(self._losses))]
        comparison = self.comparison
        if not comparison.is_complete and step > comparison.step:
            comparison.add(step, value)

    def course_changes(self, step: int, because: str = _CHANGED) -> None:
        """Say that a command changes the losses of the steps after this one."""
        self._changes.append(step)
        self.comparison.course_changes(because)

    def first_change(self, step: int) -> int | None:
        """Return the first step after `step` that a command has changed."""
        return min((each + 1 for each in self._changes if each > step), default=None)

    def go_back(self, step: int, course: LossCourse) -> LossComparison:
        """Training goes back to `step`: forget what follows, and compare what comes with it."""
        last = step + COMPARED
        before = {at: loss for at, loss in self._losses.items() if step < at <= last}
        read = {at: float("nan") if (value := number(loss)) is None else value for at, loss in before.items()}
        self._losses = {at: loss for at, loss in self._losses.items() if at <= step}
        self._changes = [each for each in self._changes if each <= step]
        self.until = last
        self.comparison = LossComparison(step, read, course)
        return self.comparison

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps for `restore`, plain JSON values. It waits for the losses' device."""
        start = max(len(self._losses) - _CARRIED, 0)
        losses = {step: number(loss) for step, loss in islice(self._losses.items(), start, None)}
        self._losses.update(losses)  # a tensor is read once
        return {"losses": [list(pair) for pair in losses.items()], "changes": self._changes[-_CARRIED:]}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Go on after a restart from where `state` was taken; None where the checkpoint does not hold it."""
        held = state or {"losses": [], "changes": []}
        self._losses = {int(at): loss for at, loss in held["losses"]}
        self._changes = [int(each) for each in held["changes"]]
        self.until, self.comparison = step + COMPARED, NOTHING
