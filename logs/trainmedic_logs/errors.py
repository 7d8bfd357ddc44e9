from __future__ import annotations

from trainmedic.errors import TrainmedicError


class DumpError(TrainmedicError):
    """No flight recorder dump, or not plain values."""
