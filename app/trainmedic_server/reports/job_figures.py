from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmedic_server.reports.anomalies import AnomalyRecord
from trainmedic_server.reports.bottleneck import MemoryUse, StepShares, Straggler
from trainmedic_server.reports.cpu_use import CpuUse
from trainmedic_server.reports.efficiency import UsualThroughput
from trainmedic_server.reports.goodput import ProgressPoints
from trainmedic_server.reports.points import Spread


@dataclass(frozen=True, slots=True)
class JobFigures:
    """Figures of a job from Prometheus. None or empty: no data."""

    every: float = 0.0  # Seconds between points.
    progress: ProgressPoints | None = None
    gpus: int | None = None  # Most at one time.
    no_gpus: str | None = None  # Why figures of GPUs are missing, if Prometheus refused their queries.
    utilisation: Spread | None = None  # Percent, as memory.
    memory: Spread | None = None
    throughput: Spread | None = None
    unit: str | None = None  # Of `throughput`.
    baseline: UsualThroughput | None = None
    shares: StepShares | None = None
    straggler: Straggler | None = None
    memory_use: MemoryUse = field(default_factory=MemoryUse)
    anomalies: Sequence[AnomalyRecord] = ()
    gpu_anomalies: Sequence[AnomalyRecord] | None = None
    """None if utilisation and memory use are unknown."""
    cpu: CpuUse | None = None
