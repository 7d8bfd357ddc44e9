"""The gradient norms by layer, as Prometheus is shown them: those of a few layers.

Not here: measuring them (the integrations).
"""

from __future__ import annotations

import math
from typing import Any, Mapping

from trainmedic.job.reported_values import number


def largest(norms: Mapping[str, Any], most: int) -> dict[str, float]:
    """The norms of at most so many layers: those that are no number, in the order given, then the largest."""
    read = {layer: norm for layer, value in norms.items() if (norm := number(value)) is not None}
    broken = [layer for layer, norm in read.items() if math.isnan(norm)]
    fine = sorted((layer for layer, norm in read.items() if not math.isnan(norm)), key=lambda layer: -read[layer])
    return {layer: read[layer] for layer in (*broken, *fine)[:most]}
