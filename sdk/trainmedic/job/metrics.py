"""Optional Prometheus endpoint of a job."""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Iterable, Iterator, Mapping

from trainmedic.errors import ConfigurationError
from trainmedic.job.loss_trend import LossTrend
from trainmedic.job.progress import WINDOWS, Progress
from trainmedic.job.rank_stats import Sample, prometheus_samples
from trainmedic.job.reported_values import number
from trainmedic.wire.evaluations import EvaluatedMetric

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError:  # the extra "metrics" is not installed
    prometheus_client = None  # type: ignore[assignment]
    Collector = object  # type: ignore[assignment,misc]

Ranks = Callable[[], Mapping[int, Mapping[str, Any]]]  # figures by rank

HELP = {
    "training_loss": "Loss of the last reported step.",
    "training_loss_lowest_of_five": "The lowest loss of the last five reports.",
    "training_loss_spread": "Median absolute deviation of the last hundred losses, from their trend if they fall.",
    "training_throughput_samples_per_second": "Samples per second, over the last few steps.",
    "training_throughput_tokens_per_second": "Tokens per second, over the last few steps.",
    "training_evaluation_loss": "Loss of the last evaluation.",
    "training_evaluation_perplexity": "Perplexity of the last evaluation.",
    "training_evaluation_step": "Step of the last evaluation.",
    "training_evaluation_metric": "Newest value of a metric of evaluations; NaN if it was not a finite number.",
    "training_evaluation_metric_step": "Training step of that value.",
    "training_target_samples_per_second": "Declared target of the job, in samples per second.",
    "training_target_tokens_per_second": "Declared target of the job, in tokens per second.",
    "gradient_norm": "Norm of the gradient at the last reported step.",
    "training_layer_gradient_norm": "Gradient norm of a layer: of layers with a non-finite norm, and of the largest.",
    "training_learning_rate": "Learning rate at the last reported step.",
    "training_learning_rate_expected": "Scheduled learning rate, times Trainmedic's scale.",
    "training_learning_rate_deviation": "Difference of both learning rates, as a fraction of the larger one; 0 to 1.",
    "training_step": "Number of the last reported step.",
    "training_steps_total": "Steps reported since the process began.",
    "training_step_seconds": "Duration of a step, over the last few; at least that of the current one so far.",
    "training_step_median_seconds": "Median duration of a step, over the last hundred reports.",
    "training_stall_seconds": "Time since the last report, excluding windows.",
    "training_hang_limit_seconds": "Stall above which the job counts as hanging.",
    "training_window_open": "1 if the loop is in that kind of window, else 0.",
    "training_window_seconds_total": "Time in that kind of window.",
    "training_checkpoint_step": "Step of the newest complete checkpoint.",
    "training_checkpoint_timestamp_seconds": "Time of the newest complete checkpoint, in seconds since 1970.",
    "training_ranks_differing": "Ranks whose weights differ from most, where all should be equal.",
    "training_rollback_not_held": "1 if later losses or batches showed that the last rollback does not hold, else 0.",
    "training_ranks": "Ranks whose figures are known.",
    "training_memory_used_bytes": "Memory in use, on the rank that has least left.",
    "training_memory_limit_bytes": "Memory that this rank can use.",
    "training_memory_rank": "Number of the rank that has least memory left.",
    "training_memory_growth_bytes_per_step": "Lasting growth of memory per step, of the rank that grows most.",
    "training_memory_resident_bytes": "Resident memory of a rank and its children, the largest.",
    "training_cuda_memory_reserved_bytes": "CUDA memory that PyTorch holds, in use or cached, the largest.",
    "training_cuda_memory_retries_total": "CUDA allocations that succeeded only after the cache was emptied.",
    "training_cpu_cores": "Processor cores that a rank and its children keep busy, the median rank.",
    "training_rank_cpu_cores": "Processor cores of each of the busiest and the least busy ranks.",
    "training_own_median_seconds": "Time per step that a rank works and does not wait for others, the median.",
    "training_rank_own_seconds": "Time per step that a rank works and does not wait, each of the slowest ranks.",
    "training_data_seconds": "Time per step that a rank waits for its batches, the median rank.",
    "training_compute_seconds": "Time per step that a rank neither waits for batches nor for others, the median rank.",
    "training_wait_seconds": "Time per step that a rank waits for others, the median rank.",
    "training_rank_data_seconds": "Time per step that a rank waits for its batches, each of the slowest ranks.",
}


class JobCollector(Collector):
    def __init__(
        self,
        job: str,
        progress: Progress,
        ranks: Ranks,
        now: Callable[[], float],
        evaluated: Callable[[], Iterable[EvaluatedMetric]] | None = None,
    ) -> None:
        self._job = job
        self._evaluated = evaluated or progress.evaluated_metrics
        self._progress = progress
        self._ranks = ranks
        self._now = now
        self._loss_trend = LossTrend()

    def collect(self) -> Iterator[Metric]:  # called by the endpoint's threads
        families: dict[str, Metric] = {}
        for sample in self._samples():
            labels = {"job_name": self._job, **sample.labels}
            family = families.get(sample.name)
            if family is None:
                kind = CounterMetricFamily if sample.name.endswith("_total") else GaugeMetricFamily
                family = kind(sample.name, HELP[sample.name])
                families[sample.name] = family
            family.add_sample(sample.name, labels, sample.value)
        yield from families.values()

    def _samples(self) -> Iterator[Sample]:
        now, progress = self._now(), self._progress
        for name, value in progress.values(now).items():
            yield Sample(name, {}, value)
        for metric in self._evaluated():
            value = math.nan if metric.value is None else metric.value
            yield Sample("training_evaluation_metric", {"metric": metric.name}, value)
            if metric.step is not None:
                yield Sample("training_evaluation_metric_step", {"metric": metric.name}, metric.step)
        for layer, norm in largest_norms(progress.layer_norms, progress.most_layers).items():
            yield Sample("training_layer_gradient_norm", {"layer": layer}, norm)
        for name, value in self._loss_trend.values(progress.record).items():
            yield Sample(name, {}, value)
        # A consistent pair: rules find repeated steps by the difference.
        steps, step = progress.reached
        yield Sample("training_steps_total", {}, steps)
        if step is not None:
            yield Sample("training_step", {}, step)
        stall = progress.stall(now)
        yield Sample("training_stall_seconds", {}, stall.seconds)
        yield Sample("training_hang_limit_seconds", {}, stall.limit)
        is_open, seconds = progress.window, progress.seconds_in_windows(now)
        for window in WINDOWS:
            yield Sample("training_window_open", {"window": window}, float(window == is_open))
            yield Sample("training_window_seconds_total", {"window": window}, seconds[window])
        if progress.checkpoint is not None:
            step, at = progress.checkpoint
            yield Sample("training_checkpoint_step", {}, step)
            yield Sample("training_checkpoint_timestamp_seconds", {}, at)
        if progress.ranks_differing is not None:
            yield Sample("training_ranks_differing", {}, progress.ranks_differing)
        if progress.rollback_not_held is not None:
            yield Sample("training_rollback_not_held", {}, float(progress.rollback_not_held))
        yield from prometheus_samples(self._ranks())


class MetricsEndpoint:
    """``http://host:port/metrics``. Raises ConfigurationError if it cannot be opened."""

    def __init__(
        self,
        job: str,
        progress: Progress,
        ranks: Ranks,
        host: str,
        port: int,
        evaluated: Callable[[], Iterable[EvaluatedMetric]] | None = None,
    ) -> None:
        if prometheus_client is None:
            raise ConfigurationError(
                "metrics_port needs prometheus_client: install it, or the extra metrics of trainmedic "
                "(docs/how-to/install.md#extras)"
            )
        registry = CollectorRegistry(auto_describe=False)
        registry.register(JobCollector(job, progress, ranks, time.perf_counter, evaluated))
        # Rules detect restarts by the start time of the process.
        prometheus_client.ProcessCollector(registry=registry)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"metrics cannot be offered at {host}:{port}: {error}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def largest_norms(norms: Mapping[str, Any], most: int) -> dict[str, float]:
    # Norms that are not finite come first.
    read = {layer: norm for layer, value in norms.items() if (norm := number(value)) is not None}
    broken = [layer for layer, norm in read.items() if math.isnan(norm)]
    fine = sorted((layer for layer, norm in read.items() if not math.isnan(norm)), key=lambda layer: -read[layer])
    return {layer: read[layer] for layer in (*broken, *fine)[:most]}
