"""The error of reading logs and dumps."""

from __future__ import annotations

from trainmedic.errors import TrainmedicError


class DumpError(TrainmedicError):
    """A file is no flight recorder's dump, or holds more than plain values. It was written by a job: nothing of it is
    believed."""
