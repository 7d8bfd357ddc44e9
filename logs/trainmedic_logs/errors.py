from __future__ import annotations

from trainmedic.errors import TrainmedicError


class DumpError(TrainmedicError):
    """A flight recorder dump cannot be read, or not be sent."""
