"""The error of expressions and templates, which server, agent and the reading of logs evaluate."""

from __future__ import annotations

from trainmedic.errors import TrainmedicError


class ExpressionError(TrainmedicError):
    """A template or expression failed while a run used it."""
