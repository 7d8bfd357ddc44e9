from __future__ import annotations

from trainmedic.errors import TrainmedicError


class ExpressionError(TrainmedicError):
    """Evaluating a template or expression failed."""
