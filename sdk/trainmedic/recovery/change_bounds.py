"""By how much commands may scale what a training works with, as a factor of the script's own value.

A factor that was mistyped, such as 50 for 0.5, must neither be carried out nor be made again at each restart. Who calls
it: ``changes``, for every command and for what it reads from disk.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Mapping

from trainmedic.errors import Rejected

log = logging.getLogger("trainmedic")

SMALLEST_LR_SCALE = 1e-3
"""Times the script's own learning rate: at less a training stands still, and nothing is repaired by lowering it."""
LARGEST_GROWTH = 1000
"""Times the script's own batch or accumulation: a step that takes so much longer would never end to have it undone."""

_ROUNDING = 1 + 1e-9  # so that a tenth of a tenth of a tenth is a thousandth


@dataclass(frozen=True)
class FactorBounds:
    """The bounds of one value. ``what`` names it; ``least`` and ``most`` bound the product of all factors in force."""

    what: str
    least: float
    most: float

    def check(self, factors: Mapping[str, float], added: float | None) -> None:
        """Raises Rejected where the product of `factors` is out of bounds, or the one that was ``added`` by itself."""
        for factor in (math.prod(factors.values()), *(() if added is None else (added,))):
            if not self._contain(factor):
                raise Rejected(
                    f"{self.what} would be {factor:g} times the script's own, and commands may make it "
                    f"{self.least:g} to {self.most:g} times of that"
                )

    def kept(self, factors: Mapping[str, float]) -> dict[str, float]:
        """The factors without those that take the product out of bounds, which are logged."""
        kept: dict[str, float] = {}
        for command_id, factor in factors.items():
            if self._contain(math.prod(kept.values()) * factor):
                kept[command_id] = factor
            else:
                log.warning(
                    "%s was scaled by %g, by command %s; that is out of bounds, and is not done again",
                    self.what,
                    factor,
                    command_id,
                )
        return kept

    def _contain(self, product: float) -> bool:
        return self.least <= product * _ROUNDING and product <= self.most * _ROUNDING
