"""This rank's loss as a number, without waiting for a device."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from trainmedic.job.reported_values import detached

COPY_INTERVAL = 1.0  # Seconds; a copy takes tens of microseconds


class _Copy(NamedTuple):
    step: int | None
    tensor: Any
    event: Any  # of the device, complete when the copy is


class OwnLoss:
    """Any thread may read ``latest``."""

    __slots__ = ("_copy", "due_at", "latest")

    def __init__(self) -> None:
        self.latest: tuple[int | None, float] | None = None
        """Step and loss, replaced as a whole."""
        self._copy: _Copy | None = None
        self.due_at = float("-inf")

    def note(self, step: int | None, loss: Any, now: float) -> None:
        """Take a loss; tensors once a second, read when their copy is complete."""
        if type(loss) is float:
            self.latest = (step, loss)
            return
        if now < self.due_at:
            return
        if self._copy is not None:
            self._take_copy(self._copy)
        if self._copy is None:
            self.due_at = now + COPY_INTERVAL
            self._read(step, loss)

    def forget(self) -> None:
        self.latest = self._copy = None
        self.due_at = float("-inf")

    def _read(self, step: int | None, loss: Any) -> None:
        try:
            is_tensor = callable(getattr(loss, "detach", None))
            value = loss
            if hasattr(loss, "placements"):  # sharded over ranks: take this rank's part if that is the whole
                value = detached(loss)
            elif is_tensor:
                value = loss.detach()
            if is_tensor and type(value) is not float and not getattr(value, "is_cpu", False):
                self._copy = _begun_copy(step, value)
            else:
                self.latest = (step, float(value))
        # Unknown: several numbers or none, a failed device, or a library without such copies.
        except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError):
            self._copy = None

    def _take_copy(self, copy: _Copy) -> None:
        try:
            if copy.event.query():
                self.latest = (copy.step, float(copy.tensor))
                self._copy = None
        except (RuntimeError, TypeError, ValueError):  # as above
            self._copy = None


def _begun_copy(step: int | None, tensor: Any) -> _Copy | None:
    """Queue a copy on the tensor's device; None if impossible."""
    library = getattr(sys.modules.get("torch"), tensor.device.type, None)
    if library is None or not hasattr(library, "Event") or not hasattr(library, "current_stream"):
        return None
    is_capturing = getattr(library, "is_current_stream_capturing", None)
    if is_capturing is not None and is_capturing():
        return None
    copied = tensor.to("cpu", non_blocking=True)
    event = library.Event()
    event.record(library.current_stream(tensor.device))
    return _Copy(step, copied, event)
