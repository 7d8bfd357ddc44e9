"""Training loop around a DeepSpeed engine.

The engine follows the run's count of batches: with its own, a changed accumulation would make one step too short.
"""

from __future__ import annotations

from typing import Any

import torch

from trainmedic.deepspeed.engine_waits import EngineWaits
from trainmedic.torch.boundary import StepBoundary
from trainmedic.torch.run import Run
from trainmedic.torch.steps import Step
from trainmedic.torch.training_state import TrainingState


class EngineStep(Step):
    """Work on one batch. ``is_update``: the engine steps its optimizer."""

    __slots__ = ("_engine",)

    def __init__(self, boundary: StepBoundary, number: int, is_update: bool, engine: Any) -> None:
        super().__init__(boundary, number, is_update)
        self._engine = engine

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def update(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Call ``engine.step()``; return the gradients' norm after an optimizer step, else None.

        Raises TypeError for ``max_norm``: the engine clips by its own configuration.
        """
        if max_norm is not None:
            raise TypeError("max_norm: a DeepSpeed engine clips by gradient_clipping in its configuration")
        self._engine.step()
        return self._engine.get_global_grad_norm() if self.is_update else None


class EngineRun(Run):
    def __init__(
        self, training: TrainingState, engine: Any, checkpoint_every: int | None, checkpoint_at_start: bool
    ) -> None:
        super().__init__(training, checkpoint_every, checkpoint_at_start, accumulates=True)
        self._engine = engine
        waits = EngineWaits.of(engine) if training.medic.world_size > 1 else None
        if waits is not None:
            self._boundary.meter.waits.add(engine.module, waits)
        managed = getattr(type(engine), "managed_gradient_accumulation", None)
        # Engines whose loop calls engine.step() only when due do not count.
        self._engine_counts = managed is None or bool(managed(engine))
        self._micro_batch = int(engine.train_micro_batch_size_per_gpu())

    def step(self) -> EngineStep:
        """``with run.step() as step:`` around the work on one batch; commands run at its end."""
        plain = super().step()
        if self.training.batches_done == 0:
            self._set_engine_batch_sizes()
        if self._engine_counts:
            self._engine.set_gradient_accumulation_boundary(plain.is_update)
        return EngineStep(self._boundary, plain.number, plain.is_update, self._engine)

    def _set_engine_batch_sizes(self) -> None:
        engine, training = self._engine, self.training
        source, micro_batch = training.batch_source, self._micro_batch
        if source is not None and source.batch_size is not None and training.script_batch_size:
            micro_batch = micro_batch * source.batch_size // training.script_batch_size
        if micro_batch != engine.train_micro_batch_size_per_gpu():
            engine.set_train_micro_batch_size(micro_batch)
        accumulation = training.accumulation
        if accumulation != engine.gradient_accumulation_steps():
            engine.set_train_batch_size(micro_batch * accumulation * engine.dp_world_size)
            if hasattr(engine.optimizer, "gradient_accumulation_steps"):
                engine.optimizer.gradient_accumulation_steps = accumulation
