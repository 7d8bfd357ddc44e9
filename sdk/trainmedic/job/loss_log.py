"""Losses by step, and the comparison of those that come again after a rollback with those of before.

The same weights, the same batch and the same random numbers give the same loss. So a first loss that differs shows
state that did not go back. The log holds the losses of the steps after each checkpoint, because a rollback goes to
nothing else.

A loop may report another number than the loss of its step, such as a running mean, which no checkpoint holds. So the
log also takes norms of gradients (`LossLog.note_gradients`). Where losses differ and all gradients are as before, the
training is as before, and its reports cannot be compared.

Pure: not here is when losses are noted (``trainmedic.torch.boundary``, ``trainmedic.trainer.rollback_proof``) and the
answer (``trainmedic.torch.verification``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any, Mapping, Sequence

from trainmedic.job.reported_values import is_one_number, kept, number

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
_OTHER_PROCESS = "an earlier process has trained the first of these steps, and its script may have been another"
_SMOOTHED = (
    "not comparable: the gradients are as before and the reported losses are not, so the loop reports another number "
    "than the loss of the step, such as a running mean; report the loss itself"
)
_CARRIED_GRADIENTS = 64
"""Steps whose gradient norms a checkpoint keeps."""

Norms = Sequence[float]
"""Norms of parts of a step's gradients, always of the same parts."""


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
    """The losses after a rollback to `step`, held against those that were reported before.

    ``earlier_until`` is the last step of an earlier process. Its script may have been another, so that its losses need
    not agree, and what follows them neither.
    """

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
        self._frozen_after = 0

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
        if not course.is_known or self._is_of_earlier_process:
            return frozenset()
        if trouble is not None:
            steps = [step for step in steps[:1] if step < trouble]
        return frozenset(step for step in steps if course.changed_at is None or step < course.changed_at)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come."""
        return self._passed >= COMPARED or bool(self._find_problem(is_last=False))

    @property
    def has_enough(self) -> bool:
        """Whether an answer that has to be given now may rest on what was compared."""
        return len(self.compared) >= FEWEST or not self._expected or bool(self._frozen_because)

    def add(self, step: int, loss: Any) -> None:
        """Take the loss of a step that was trained after the rollback."""
        now, before = number(loss), self._expected.get(step)
        if now is None or self.is_complete:
            return
        if not math.isfinite(now):
            self.not_finite_at = step
            return
        self._finite += 1
        if before is None or not math.isfinite(before) or self._is_frozen(step):
            return
        self.compared.append(step)
        if abs(now - before) > self._course.tolerance * max(self._scale, abs(now)):
            self.different[step] = (before, now)

    def step_passed(self, step: int) -> None:
        """Note that so many steps were trained, with or without a loss."""
        self._passed = max(self._passed, step - self.step)

    def add_gradients(self, step: int, norms: Any) -> None:
        """Take the norms of the gradients of a step that was trained after the rollback."""
        before = self._gradients.get(step)
        if before is None or self.is_complete or self._is_frozen(step):
            return
        now = _read_norms(norms)
        limit = self._course.tolerance * max(map(abs, before), default=0.0)
        # Gradients of zero, such as those behind a layer that begins with zeros, show nothing.
        self._gradients_agree[step] = (
            any(before)
            and len(now) == len(before)
            and all(
                abs(one - other) <= max(limit, self._course.tolerance * abs(other))
                for one, other in zip(now, before, strict=True)
            )
        )

    def _is_frozen(self, step: int) -> bool:
        return bool(self._frozen_because) and step > self._frozen_after

    def _trains_as_before(self, step: int) -> bool | None:
        """Return whether the gradients show it for the steps up to the first update since that one; None where that is
        still to come."""
        update = min((each for each in self._gradients if each >= step), default=None)
        if update is None or not all(agree for at, agree in self._gradients_agree.items() if at <= update):
            return False
        return True if update in self._gradients_agree else None

    def course_changes(self, because: str, after: int = 0) -> None:
        """Stop comparing: from the step ``after`` on other losses come on purpose. They must still be finite."""
        if not self._frozen_because:
            self._frozen_because, self._frozen_after = because, after

    @property
    def problem(self) -> str:
        """What shows that the rollback does not hold; empty where nothing does."""
        return self._find_problem(is_last=True)

    def _find_problem(self, is_last: bool) -> str:
        """Return the problem. Unless ``is_last``, a loss that the next gradients may explain is none yet."""
        if self.not_finite_at is not None:
            after = self.not_finite_at - self.step
            return f"the loss of step {self.not_finite_at} is not a finite number, {after} step(s) after the checkpoint"
        for step in sorted(self._required & self.different.keys()):
            is_same = self._trains_as_before(step)
            if is_same or (is_same is None and not is_last):
                continue
            return self._told_difference(step)
        return ""

    def _told_difference(self, step: int) -> str:
        before, now = self.different[step]
        agreed = sum(each < step for each in self.compared)
        earlier = f" after {agreed} that agree" if agreed else ", the first that was compared"
        return f"the loss of step {step} is {now:.8g}, and was {before:.8g} before{earlier}"

    @property
    def first_differs(self) -> bool:
        """Whether the first compared loss is among those that differ. It is made with the weights of the checkpoint."""
        return bool(self.compared) and self.compared[0] in self.different

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
        elif self._required & self.different.keys():
            compared = len(self._gradients_agree)
            member["gradients"] = {"compared": compared, "agreed": sum(self._gradients_agree.values())}
            member["why"] = _SMOOTHED
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
        elif self._is_of_earlier_process:
            why = _OTHER_PROCESS
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


def _read_norms(norms: Any) -> list[float]:
    """Return them as numbers, which waits for their device; NaN stands for what is not finite."""
    read: list[float] = []
    for each in norms:
        values = each.tolist() if hasattr(each, "tolist") else each
        read.extend(number(value) or 0.0 for value in (values if isinstance(values, list) else [values]))
    return read


class _NoComparison(LossComparison):
    """The comparison of a training that has not gone back. It takes nothing, because all trainings share it."""

    def add(self, step: int, loss: Any) -> None:
        return

    def step_passed(self, step: int) -> None:
        return

    def add_gradients(self, step: int, norms: Any) -> None:
        return

    def course_changes(self, because: str, after: int = 0) -> None:
        return


NOTHING = _NoComparison(0, {}, LossCourse(not_comparable="there was no rollback"))


class LossLog:
    """Losses of one course of training. For its training thread."""

    __slots__ = ("_changes", "_gradients", "_losses", "_resumed_at", "comparison", "until")

    def __init__(self) -> None:
        self.until = 0
        """The last step whose loss is to be noted."""
        self.comparison: LossComparison = NOTHING
        """The last one that `go_back` began."""
        self._losses: dict[int, Any] = {}
        self._gradients: dict[int, Any] = {}
        self._changes: list[int] = []
        self._resumed_at = 0

    def expect_from(self, step: int) -> None:
        """Note the losses that follow, because a rollback may go to that step."""
        self.until = max(self.until, step + COMPARED)

    def note(self, step: int, loss: Any) -> None:
        """Take the loss of a step. A tensor is copied on its device and read later. What is no number is no loss."""
        if not is_one_number(loss):
            return
        self._losses[step] = value = kept(loss)
        if len(self._losses) > _LONGEST:
            del self._losses[next(iter(self._losses))]
        comparison = self.comparison
        if not comparison.is_complete and step > comparison.step:
            comparison.add(step, value)

    def note_gradients(self, step: int, norms: Any) -> None:
        """Take norms of the gradients that the updates of a step use: numbers, or tensors that are read later."""
        self._gradients[step] = norms
        if len(self._gradients) > _LONGEST:
            del self._gradients[next(iter(self._gradients))]
        if step > self.comparison.step:
            self.comparison.add_gradients(step, norms)

    def course_changes(self, step: int, because: str = _CHANGED, spares_next: bool = False) -> None:
        """Say that a command changes the losses of the steps after this one; with ``spares_next`` not that of the next
        step, which is made before its own update."""
        self._changes.append(step)
        self.comparison.course_changes(because, step + spares_next)

    def first_change(self, step: int) -> int | None:
        """Return the first step after `step` that a command has changed."""
        return min((each + 1 for each in self._changes if each > step), default=None)

    def go_back(self, step: int, course: LossCourse) -> LossComparison:
        """Training goes back to `step`: forget what follows, and compare what comes with it."""
        last = step + COMPARED
        before = {at: loss for at, loss in self._losses.items() if step < at <= last}
        read = {at: float("nan") if (value := number(loss)) is None else value for at, loss in before.items()}
        norms = {at: _read_norms(each) for at, each in self._gradients.items() if step < at <= last}
        self._losses = {at: loss for at, loss in self._losses.items() if at <= step}
        self._gradients = {at: each for at, each in self._gradients.items() if at <= step}
        self._changes = [each for each in self._changes if each <= step]
        self.until = last
        self.comparison = LossComparison(step, read, course, norms, self._resumed_at)
        self._resumed_at = min(self._resumed_at, step)  # this process trains what follows, and repeats that
        return self.comparison

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps for `restore`, plain JSON values. It waits for the losses' device."""
        start = max(len(self._losses) - _CARRIED, 0)
        losses = {step: number(loss) for step, loss in islice(self._losses.items(), start, None)}
        self._losses.update(losses)  # a tensor is read once
        newest = list(self._gradients.items())[-_CARRIED_GRADIENTS:]
        gradients = {step: _read_norms(norms) for step, norms in newest}
        self._gradients.update(gradients)
        return {
            "losses": [list(pair) for pair in losses.items()],
            "gradients": [list(pair) for pair in gradients.items()],
            "changes": self._changes[-_CARRIED:],
        }

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Go on in a new process from where `state` was taken; None where the checkpoint does not hold it."""
        held = state or {"losses": [], "changes": []}
        self._losses = {int(at): loss for at, loss in held["losses"]}
        self._gradients = {int(at): norms for at, norms in held.get("gradients", ())}
        self._changes = [int(each) for each in held["changes"]]
        self.until, self.comparison, self._resumed_at = step + COMPARED, NOTHING, step
