"""Stand-in until the module lands."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class LearningRate:
    def __init__(self) -> None:
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._base: list[float] | None = None

    def attach(self, optimizer: Any, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        bases = getattr(scheduler, "base_lrs", None)
        if bases is not None and self._base is not None:
            for index, (mine, theirs) in enumerate(zip(self._base, bases)):
                if mine != theirs and theirs:
                    self._scale_group(index, mine / theirs)
                    bases[index] = mine
        self._base = list(bases) if bases is not None else None

    def _scale_group(self, index: int, factor: float) -> None:
        group = self._optimizer.param_groups[index]
        group["lr"] *= factor
        if "initial_lr" in group:
            group["initial_lr"] *= factor

    def scale(self, factor: float) -> tuple[float, float]:
        before = float(self._optimizer.param_groups[0]["lr"])
        for index in range(len(self._optimizer.param_groups)):
            self._scale_group(index, factor)
        if self._base is not None:
            self._scheduler.base_lrs = self._base = [base * factor for base in self._base]
        return before, float(self._optimizer.param_groups[0]["lr"])

    def now(self) -> tuple[Any, Any]:
        return self._optimizer.param_groups[0]["lr"], None

    def save(self, path: Path) -> None:
        pass
