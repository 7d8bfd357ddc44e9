"""The optional Prometheus endpoint of a job. Everything it shows is worked out when it is asked.

Not here: what was reported and what follows from it (``progress``).
"""

from __future__ import annotations

import time
from typing import Callable, Iterator

from trainmedic.errors import ConfigurationError
from trainmedic.progress import Progress

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError:  # the extra "metrics" is not installed
    prometheus_client = None  # type: ignore[assignment]
    Collector = object  # type: ignore[assignment,misc]

_HELP = {
    "training_loss": "Loss of the last reported step.",
    "training_throughput_samples_per_second": "Samples per second, over the last few steps.",
    "gradient_norm": "Norm of the gradient at the last reported step.",
    "training_learning_rate": "Learning rate at the last reported step.",
    "training_learning_rate_expected": "What the schedule says, times what Trainmedic has scaled it by.",
    "training_learning_rate_deviation": "How far the two are apart, as a part of the larger one; 0 to 1.",
    "training_step_median_seconds": "Median length of a step, over the last hundred reports.",
    "training_step_seconds": "Length of a step, over the last few; at least as long as the present one has lasted.",
}


class _Shown(Collector):
    def __init__(self, job: str, progress: Progress, now: Callable[[], float]) -> None:
        self._job = job
        self._progress = progress
        self._now = now

    def collect(self) -> Iterator[Metric]:
        for name, value in self._progress.values(self._now()).items():
            gauge = GaugeMetricFamily(name, _HELP[name], labels=["job_name"])
            gauge.add_metric([self._job], value)
            yield gauge
        steps = CounterMetricFamily("training_steps", "Steps reported since the process began.", labels=["job_name"])
        steps.add_metric([self._job], self._progress.steps)
        yield steps


class Endpoint:
    """``http://host:port/metrics``. Raises ConfigurationError where it cannot be opened."""

    def __init__(self, job: str, progress: Progress, host: str, port: int) -> None:
        if prometheus_client is None:
            raise ConfigurationError("metrics_port needs prometheus_client: pip install 'trainmedic[metrics]'")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Shown(job, progress, time.perf_counter))
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"metrics cannot be offered at {host}:{port}: {error}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
