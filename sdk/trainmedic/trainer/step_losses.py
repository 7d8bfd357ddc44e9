"""Unrounded losses of a framework's steps on this rank."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

from torch import nn

from trainmedic.job.loss_log import LossLog
from trainmedic.job.reported_values import is_one_number
from trainmedic.torch.learning_rate import marked_scale
from trainmedic.torch.loss_course import CompletedRollback, begin_comparison


class StepLosses:
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

    def go_back(
        self,
        record: Mapping[str, Any] | None,
        step: int,
        models: Iterable[nn.Module],
        optimizers: Iterable[Any],
        accumulation: int,
        data: str,
        skipped: int,
        trouble_at: int | None,
    ) -> None:
        self._parts, self.step = [], step
        state, scale = record or {}, marked_scale(optimizers)
        rollback = CompletedRollback(
            step=step,
            data=data,
            skipped=skipped,
            accumulation=accumulation,
            accumulation_then=(state.get("losses") or {}).get("accumulation", accumulation),
            is_scaled_otherwise=state.get("lr_scale", scale) != scale,
            trouble_at=trouble_at,
        )
        begin_comparison(self.log, rollback, models)
