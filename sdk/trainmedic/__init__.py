"""Repair of a running training job by Trainmedic.

Names are imported on first use, which keeps the node agent small.
"""

import importlib
from typing import TYPE_CHECKING

from trainmedic.errors import (
    ConfigurationError,
    Interrupted,
    NotAgreed,
    Refusal,
    Rejected,
    TrainmedicError,
    Unsupported,
)
from trainmedic.version import __version__

if TYPE_CHECKING:
    from trainmedic.client import Medic, connect
    from trainmedic.job.command import JobCommand
    from trainmedic.job.handlers import LIVE, RESTART, UNSUPPORTED
    from trainmedic.job.parameters import (
        Accumulate,
        Checkpoint,
        DataloaderWorkers,
        EmptyCache,
        Parameters,
        Pause,
        Resume,
        Rollback,
        ScaleBatch,
        ScaleLr,
        Stop,
    )

__all__ = [
    "LIVE",
    "RESTART",
    "UNSUPPORTED",
    "Accumulate",
    "Checkpoint",
    "ConfigurationError",
    "DataloaderWorkers",
    "EmptyCache",
    "Interrupted",
    "JobCommand",
    "Medic",
    "NotAgreed",
    "Parameters",
    "Pause",
    "Refusal",
    "Rejected",
    "Resume",
    "Rollback",
    "ScaleBatch",
    "ScaleLr",
    "Stop",
    "TrainmedicError",
    "Unsupported",
    "__version__",
    "connect",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in __all__:
            for module in ("client", "job.command", "job.handlers", "job.parameters"):
                value = getattr(importlib.import_module(f"trainmedic.{module}"), name, None)
                if value is not None:
                    globals()[name] = value
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
