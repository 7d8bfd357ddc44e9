"""Let a running training job be repaired by Trainmedic.

`connect` a job, `Medic.report` each step, and carry out `Medic.commands` between steps. See
``README.md`` for a first example, ``errors`` for what can go wrong.
"""

from trainmedic.client import LIVE, RESTART, Medic, connect
from trainmedic.commands import JobCommand
from trainmedic.desk import UNSUPPORTED
from trainmedic.errors import (
    ConfigurationError,
    Interrupted,
    NotAgreed,
    Refusal,
    Rejected,
    TrainmedicError,
    Unsupported,
)
from trainmedic.parameters import (
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
from trainmedic.version import __version__

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
