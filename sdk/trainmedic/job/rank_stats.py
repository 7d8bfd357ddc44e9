"""A rank's figures for rank 0."""

from __future__ import annotations

import math
import statistics
import threading
import time
from typing import Any, Iterator, Mapping, NamedTuple

from trainmedic.job import process_usage
from trainmedic.job.process_usage import CpuMeter
from trainmedic.job.progress import Progress
from trainmedic.job.reported_values import finite

HOST = "host"
CUDA = "cuda"
DEVICE = "device"  # accelerators other than CUDA, by the script's reports
MEMORIES = (HOST, CUDA, DEVICE)
SLOWEST = 3  # ranks shown by number
EXTREMES = 3  # busiest and least busy ranks each


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


class RankStats:
    def __init__(self, progress: Progress, node: str) -> None:
        self._progress = progress
        self._node = node
        self._growth = {memory: process_usage.Growth() for memory in MEMORIES}
        self._cpu = CpuMeter(time.perf_counter())
        self._lock = threading.Lock()  # the threads of synchronizer and metrics endpoint call `measure`

    def measure(self, now: float) -> dict[str, Any]:
        """Return figures by name, all numbers except ``node``."""
        figures: dict[str, Any] = {"step": self._progress.step, **self.own_loss()}
        for part, seconds in self._progress.pace.parts()._asdict().items():
            figures[f"{part}_seconds"] = seconds
        resident, host = process_usage.resident_bytes(), process_usage.host_memory()
        figures["resident"] = resident
        if host is not None:
            figures[f"{HOST}_used"], figures[f"{HOST}_limit"] = host
        cuda = process_usage.cuda_memory()
        if cuda is not None:
            figures[f"{CUDA}_used"], figures[f"{CUDA}_limit"] = cuda.allocated, cuda.total
            figures["cuda_reserved"], figures["cuda_retries"] = cuda.reserved, cuda.retries
        figures[f"{DEVICE}_used"] = finite(self._progress.memory_bytes)
        sizes = {HOST: resident, CUDA: cuda.allocated if cuda else None, DEVICE: figures[f"{DEVICE}_used"]}
        with self._lock:
            figures["cpu_cores"] = self._cpu.cores(now)
            for memory, size in sizes.items():
                if size is not None:
                    self._growth[memory].add_sample(self._progress.steps, size, now)
                    figures[f"{memory}_growth"] = self._growth[memory].per_step()
        return {name: value for name, value in figures.items() if value is not None}

    def own_loss(self) -> dict[str, Any]:  # with the node
        latest = self._progress.own_loss.latest
        own: dict[str, Any] = {"node": self._node}
        return own if latest is None else {**own, "loss": latest[1], "loss_step": latest[0]}


def prometheus_samples(ranks: Mapping[int, Mapping[str, Any]]) -> Iterator[Sample]:
    yield Sample("training_ranks", {}, len(ranks))
    for memory in MEMORIES:
        yield from _memory_samples(ranks, memory)
    yield from _pace_samples(ranks)
    yield from _cpu_samples(ranks)


def _memory_samples(ranks: Mapping[int, Mapping[str, Any]], memory: str) -> Iterator[Sample]:
    labels = {"memory": memory}
    in_use = _figures(ranks, f"{memory}_used")
    if in_use:
        # Without a limit, the largest counts.
        fullest = max(in_use, key=lambda rank: in_use[rank] / (_figure(ranks[rank], f"{memory}_limit") or 1.0))
        yield Sample("training_memory_used_bytes", labels, in_use[fullest])
        limit = _figure(ranks[fullest], f"{memory}_limit")
        if limit is not None:
            yield Sample("training_memory_limit_bytes", labels, limit)
        yield Sample("training_memory_rank", labels, fullest)
    growths = _figures(ranks, f"{memory}_growth").values()
    if growths:
        yield Sample("training_memory_growth_bytes_per_step", labels, max(growths))
    for name, kind in (("resident", HOST), ("cuda_reserved", CUDA), ("cuda_retries", CUDA)):
        values = _figures(ranks, name).values()
        if kind == memory and values:
            yield Sample(_MEMORY_METRICS[name], {}, sum(values) if name == "cuda_retries" else max(values))


_MEMORY_METRICS = {
    "resident": "training_memory_resident_bytes",
    "cuda_reserved": "training_cuda_memory_reserved_bytes",
    "cuda_retries": "training_cuda_memory_retries_total",
}


_MEDIAN_METRICS = {
    "own": "training_own_median_seconds",
    "data": "training_data_seconds",
    "compute": "training_compute_seconds",
    "wait": "training_wait_seconds",
}
_METRICS_OF_SLOWEST = {"own": "training_rank_own_seconds", "data": "training_rank_data_seconds"}


def _pace_samples(ranks: Mapping[int, Mapping[str, Any]]) -> Iterator[Sample]:
    for part, name in _MEDIAN_METRICS.items():
        of_ranks = _figures(ranks, f"{part}_seconds")
        if not of_ranks:
            continue
        # The lower median: of two ranks the faster one is the reference.
        yield Sample(name, {}, statistics.median_low(of_ranks.values()))
        slowest = sorted(of_ranks, key=lambda rank: -of_ranks[rank])[:SLOWEST] if part in _METRICS_OF_SLOWEST else ()
        for rank in slowest:
            node = str(ranks[rank].get("node", ""))
            yield Sample(_METRICS_OF_SLOWEST[part], {"rank": str(rank), "rank_node": node}, of_ranks[rank])


def _cpu_samples(ranks: Mapping[int, Mapping[str, Any]]) -> Iterator[Sample]:
    cores = _figures(ranks, "cpu_cores")
    if not cores:
        return
    yield Sample("training_cpu_cores", {}, statistics.median_low(cores.values()))
    ordered = sorted(cores, key=lambda rank: (-cores[rank], rank))
    for rank in dict.fromkeys([*ordered[:EXTREMES], *ordered[-EXTREMES:]]):
        node = str(ranks[rank].get("node", ""))
        yield Sample("training_rank_cpu_cores", {"rank": str(rank), "rank_node": node}, cores[rank])


def _figures(ranks: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, float]:
    known = {rank: _figure(figures, name) for rank, figures in ranks.items()}
    return {rank: figure for rank, figure in known.items() if figure is not None}


def _figure(figures: Mapping[str, Any], name: str) -> float | None:
    value = figures.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None
