"""Accelerate's part in the steps: loss scaling, clipping and accumulation."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from trainmedic.errors import ConfigurationError


class AcceleratedSteps:
    """Accelerate's part, used if it ``exists``. It decides on updates if it ``leads``. Raises ConfigurationError."""

    def __init__(self, accelerator: Any = None, accumulation: int | None = None) -> None:
        self._accelerator = accelerator
        self.exists = accelerator is not None
        if self.exists and not hasattr(accelerator, "gradient_accumulation_steps"):
            raise ConfigurationError(f"accelerator is {accelerator!r}; it is Hugging Face Accelerate's Accelerator")
        batches: int = accelerator.gradient_accumulation_steps if self.exists else 1
        self.leads = batches > 1
        if self.leads and accumulation not in (None, batches):
            raise ConfigurationError(
                f"accumulation is {accumulation}, and Accelerator(gradient_accumulation_steps={batches}): pass "
                "only one of them"
            )
        self.accumulation = batches if self.leads else accumulation  # None if neither states it

    @property
    def scaler(self) -> Any:
        """Accelerate's gradient scaler; None without fp16."""
        return self._accelerator.scaler if self.exists else None

    @property
    def registered(self) -> list[Any]:
        """Objects given to ``register_for_checkpointing``."""
        return list(getattr(self._accelerator, "_custom_objects", ()))

    @property
    def is_update(self) -> bool:
        return bool(self._accelerator.sync_gradients)

    def set_accumulation(self, batches: int) -> None:
        if self.leads:
            self._accelerator.gradient_accumulation_steps = batches
            self.restart_accumulation()

    def restart_accumulation(self) -> None:
        if self.exists:
            self._accelerator.step = 0

    def backward(self, loss: Any) -> None:
        self._accelerator.backward(loss)

    def clip(self, parameters: Sequence[Any], max_norm: float) -> Any:
        """Return the gradients' norm before clipping."""
        return self._accelerator.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizers: Iterable[Any]) -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
