"""The part that Hugging Face Accelerate's ``Accelerator`` has in the steps of a loop.

It scales the loss and clips the gradients, and with ``Accelerator(gradient_accumulation_steps=...)`` it also decides
which batch completes a step: the last of so many, and the last of an epoch. Not here: the batches
(``accelerated_source``), the step as the loop sees it (``steps``).
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from trainmedic.errors import ConfigurationError


class AcceleratedSteps:
    """The steps of a loop, with an ``accelerator`` or without one (None).

    ``accumulation`` is how many batches make a step, None where the loop does not say; first by the script, and where
    Accelerate ``leads`` by the accelerator. Raises ConfigurationError where the two contradict each other.
    """

    def __init__(self, accelerator: Any = None, accumulation: int | None = None) -> None:
        self._accelerator = accelerator
        self.exists = accelerator is not None
        if self.exists and not hasattr(accelerator, "gradient_accumulation_steps"):
            raise ConfigurationError(f"accelerator is {accelerator!r}; it is Hugging Face Accelerate's Accelerator")
        batches: int = accelerator.gradient_accumulation_steps if self.exists else 1
        self.leads = batches > 1
        if self.leads and accumulation not in (None, batches):
            raise ConfigurationError(
                f"accumulation is {accumulation}, and Accelerator(gradient_accumulation_steps={batches}): give one of "
                "them alone"
            )
        self.accumulation = batches if self.leads else accumulation

    @property
    def scaler(self) -> Any:
        """Accelerate's gradient scaler; None unless it trains with 16-bit floating point numbers."""
        return self._accelerator.scaler if self.exists else None

    @property
    def registered(self) -> list[Any]:
        """The objects that the script gave ``accelerator.register_for_checkpointing``."""
        return list(getattr(self._accelerator, "_custom_objects", ()))

    @property
    def is_update(self) -> bool:
        """Whether the present batch completes a step; known once the loop has entered ``accelerator.accumulate``."""
        return bool(self._accelerator.sync_gradients)

    def set_accumulation(self, batches: int) -> None:
        """Let so many batches make a step, where Accelerate leads."""
        if self.leads:
            self._accelerator.gradient_accumulation_steps = batches
            self.begin_step()

    def begin_step(self) -> None:
        """Let the next batch be the first of a step."""
        if self.exists:
            self._accelerator.step = 0

    def backward(self, loss: Any) -> None:
        self._accelerator.backward(loss)

    def clip(self, parameters: Sequence[Any], max_norm: float) -> Any:
        """Clip the gradients, and return their norm from before."""
        return self._accelerator.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizers: Iterable[Any]) -> None:
        """Step Accelerate's optimizers, which scale by themselves."""
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
