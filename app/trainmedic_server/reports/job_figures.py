"""Measured figures of a job in a period, the input of a report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmedic_server.reports.anomalies import Anomaly
from trainmedic_server.reports.bottleneck import MemoryUse, StepShares, Straggler
from trainmedic_server.reports.cpu_use import CpuUse
from trainmedic_server.reports.efficiency import Baseline
from trainmedic_server.reports.goodput import ProgressPoints
from trainmedic_server.reports.points import Spread


@dataclass(frozen=True, slots=True)
class JobFigures:
    """Figures from Prometheus. None or empty: no data."""

    every: float = 0.0
    """Seconds of an interval."""
    progress: ProgressPoints | None = None
    gpus: int | None = None
    """Maximum number of GPUs at one time."""
    no_gpus: str | None = None
    """Why Prometheus could not answer the queries about its GPUs. None if it did."""
    utilisation: Spread | None = None
    """Percent, over all its GPUs."""
    memory: Spread | None = None
    """Percent of the GPUs' memory, over all of them."""
    throughput: Spread | None = None
    unit: str | None = None
    """``samples/s`` or ``tokens/s``."""
    baseline: Baseline | None = None
    shares: StepShares | None = None
    straggler: Straggler | None = None
    memory_use: MemoryUse = field(default_factory=MemoryUse)
    anomalies: Sequence[Anomaly] = ()
    gpu_anomalies: Sequence[Anomaly] | None = None
    """Anomalies of single GPUs. None if utilisation and memory use are unknown."""
    cpu: CpuUse | None = None
    """CPU use of the ranks."""
