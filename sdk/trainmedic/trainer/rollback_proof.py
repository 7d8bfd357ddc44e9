"""Proof that a rollback went where its answer states.

Each rank compares loaded state, batches and first losses with stored values.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Iterable, Mapping

from torch import nn

from trainmedic.client import Medic
from trainmedic.errors import NotAgreed
from trainmedic.job.command import JobCommand
from trainmedic.job.group import ranks_named
from trainmedic.job.loss_log import LossLog
from trainmedic.job.reported_values import is_one_number
from trainmedic.recovery.batch_log import BatchLog
from trainmedic.recovery.health import CheckpointHealth, health_now
from trainmedic.torch import randomness
from trainmedic.torch.checkpoints.digests import DigestComparison, Modules, Optimizers, are_finite, compare, digests
from trainmedic.torch.learning_rate import marked_scale
from trainmedic.torch.loss_course import CompletedRollback, begin_comparison
from trainmedic.torch.tensor_names import plain_name
from trainmedic.torch.verification import RollbackVerification
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

_NO_DIGESTS = "the checkpoint holds no digests of them"
_NOT_DRAWN = "no batch was drawn yet"
_BASE_CHANGED = (
    "parameters that no checkpoint of an adapter holds have changed since: {}; end the job, so that its next process "
    "loads them anew"
)
_SKIPPED_MORE = "further batches are left out around the end of the epoch"


class StepLosses:
    """Unrounded losses of a framework's steps on this rank."""

    def __init__(self) -> None:
        self.log = LossLog()
        self.step = 0
        self._parts: list[Any] = []  # of the current step, whose sum is its loss

    def add(self, loss: Any) -> None:
        if is_one_number(loss):
            self._parts.append(loss)

    def step_ends(self, step: int) -> None:
        self.step = step
        parts, self._parts = self._parts, []
        if parts and step <= self.log.until:
            self.log.note(step, sum(parts))

    def record(self, step: int, optimizers: Iterable[Any], accumulation: int) -> dict[str, Any]:
        self.log.expect_from(step)
        return {
            "losses": {**self.log.state(), "accumulation": accumulation},
            "lr_scale": marked_scale(optimizers),
        }

    def restore(self, record: Mapping[str, Any] | None, step: int) -> None:
        self._parts, self.step = [], step
        self.log.restore((record or {}).get("losses"), step)

    def go_back(self, rollback: CompletedRollback, models: Iterable[nn.Module]) -> None:
        self._parts, self.step = [], rollback.step
        begin_comparison(self.log, rollback, models)


class RollbackProof:
    """Proof of one training over all restarts.

    ``not_comparable``: reason if parameters cannot be compared.
    """

    storage = True  # for `VerifiedTraining`: there are checkpoints
    carried_hint = "State outside the checkpoint did not go back"

    def __init__(self, medic: Medic, accumulation: Callable[[], int]) -> None:
        self.medic = medic
        self.batch_log = BatchLog()
        self.losses = StepLosses()
        self.not_comparable = ""
        self._accumulation = accumulation
        self._verification = RollbackVerification(self)
        self._is_back = False  # restarted, and nothing drawn yet
        self._drawn_at_checkpoint: int | None = None  # batches; None if unknown
        self._skipped: Callable[[], int] = lambda: 0
        self._skipped_at_first = 0  # left out before the first batch
        # The answer's ``verified.parameters`` and ``verified.carried``.
        self._parameters: dict[str, Any] = {"compared": 0, "agreed": 0, "ranks": medic.world_size, "why": _NO_DIGESTS}
        self.carried: Mapping[str, Any] = {}
        self._problem = ""  # why the answer must be ``failed``

    @property
    def accumulation(self) -> int:
        return self._accumulation()

    def health(self, modules: Modules, optimizers: Optimizers) -> CheckpointHealth:
        return health_now(self.medic.progress, None if self.not_comparable else are_finite(modules, optimizers))

    def record(self, step: int, modules: Modules, optimizers: Optimizers) -> dict[str, Any]:
        return {"digests": self.digests(modules, optimizers), **self.rank_record(step, optimizers)}

    def digests(self, modules: Modules, optimizers: Optimizers) -> Any:
        return None if self.not_comparable else digests(modules, optimizers)

    def rank_record(self, step: int, optimizers: Optimizers) -> dict[str, Any]:
        return {"batches": self.batch_log.state(), **self.losses.record(step, optimizers.values(), self.accumulation)}

    def restore_batches(self, record: Mapping[str, Any] | None) -> None:
        self.batch_log.restore(None if record is None else record.get("batches"))

    def expect_return(self, record: Mapping[str, Any] | None, skipped: Callable[[], int]) -> None:
        """Compare the batches drawn from now on. ``skipped`` returns the number of those left out so far."""
        self._is_back, self._skipped = True, skipped
        self._drawn_at_checkpoint = ((record or {}).get("batches") or {}).get("drawn")

    def forget_batches(self, why: str) -> None:
        self.batch_log.forget(why)

    def check_resumed(self, record: Mapping[str, Any] | None, modules: Modules, optimizers: Optimizers) -> None:
        before = None if record is None or self.not_comparable else record.get("digests")
        if before and (problem := compare(before, digests(modules, optimizers, like=before)).problem):
            message = "%s: the checkpoint was loaded otherwise than it was saved: %s; unless the script has changed, "
            log.error(
                message + "it is damaged: end the training, and resume from an older one", self.medic.job, problem
            )

    def check_loaded(self, record: Mapping[str, Any] | None, modules: Modules, optimizers: Optimizers) -> str:
        """Compare parameters and optimizer; return the difference, the same on all ranks; "" if none is known."""
        before = None if record is None else record.get("digests")
        group = self.medic.group("verify")
        why = self.not_comparable or ("" if before else _NO_DIGESTS)
        comparison = DigestComparison(0, ())
        if before and not why:
            comparison = compare(before, digests(modules, optimizers, like=before))
        self._parameters = {"compared": comparison.compared, "agreed": comparison.compared, "ranks": group.world_size}
        if why:
            self._parameters["why"] = why
        unsaved = set(comparison.different) & _unsaved_parameters(modules)
        self._problem = _BASE_CHANGED.format(", ".join(sorted(unsaved)[:3])) if unsaved else ""
        self._parameters["agreed"] -= len(unsaved)
        comparison = comparison.without(unsaved)
        try:
            reports = group.poll(comparison.problem)
        except NotAgreed as error:
            self._problem = f"it is not known whether every rank has loaded what was saved: {error}"
            self._parameters["agreed"] = 0
            return ""
        different = sorted(rank for rank, problem in reports.items() if problem)
        missing = [rank for rank in range(group.world_size) if rank not in reports]
        if missing and not different and not self._problem:
            self._problem = f"it is not known whether {ranks_named(missing)} loaded what was saved: no report"
            self._parameters["agreed"] = 0
        return f"{reports[different[0]]} ({ranks_named(different)})" if different else ""

    def before_draw(self) -> Any:
        # The first step after a rollback answers it and starts the verification.
        return randomness.capture() if self._is_back else self._verification.before_draw()

    def drawn(self, batch: Any, epoch: int, before: Any = None, why_not: str = "") -> None:
        """Record a batch. `before`: the result of `before_draw`. ``why_not``: reason to expect others."""
        if self._is_back:
            self._is_back, self._skipped_at_first = False, self._skipped()
            self.batch_log.go_back(self._drawn_at_checkpoint, epoch, self._skipped_at_first, why_not)
            if why_not:
                self._expect_other_losses(why_not)
        elif self._skipped() != self._skipped_at_first:
            self._verification.stop_comparing(_SKIPPED_MORE)
        self._verification.batch_drawn(batch, epoch, before)

    def stop_comparing(self, because: str) -> None:
        """End the comparisons of batches and losses, which now differ on purpose."""
        if not self._is_back:  # before the first batch, `drawn` does it
            self._expect_other_losses(because)
            self._verification.stop_comparing(because)

    def _expect_other_losses(self, because: str) -> None:
        self.losses.log.comparison.note_course_change(because, self.losses.step)

    def answer(self, command: JobCommand, output: Mapping[str, Any]) -> None:
        if self._is_back:
            self._is_back = False
            self.batch_log.go_back(None, 0, 0, _NOT_DRAWN)
        carried = {"carried": self.carried} if self.carried else {}
        proven = {**output, "verified": {"parameters": self._parameters, **carried}}
        if self._problem:
            batches = self.batch_log.comparison.result(_NOT_DRAWN)
            step = output["checkpoint_step"]
            reason = f"the training went back to step {step} and goes on from there, but {self._problem}"
            log.error("%s: %s", self.medic.job, reason)
            verified = {"parameters": self._parameters, "batches": batches}
            command.answer(envelope.FAILED, {**proven, "verified": verified, "reason": reason})
            return
        self._verification.begin(command, proven, is_paused=False, losses=self.losses.log.comparison)

    def step_done(self, step: int) -> None:
        self._verification.step_done(step)

    def finish(self, because: str, is_error: bool = False) -> None:
        """Answer now, as no more batches and losses follow."""
        self._verification.finish(because, is_error)


def _unsaved_parameters(modules: Modules) -> set[str]:
    """Return the digest names of PEFT models' frozen parameters, which checkpoints omit."""
    return {
        f"{part}.{plain_name(name)}"
        for part, module in modules.items()
        if hasattr(module, "peft_config")
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
