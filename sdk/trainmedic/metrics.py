"""What the training loop reports, and the optional Prometheus endpoint that shows it.

Numbers are kept as they come and turned into floats when Prometheus asks, so that a step costs next
to nothing and a tensor on a GPU is not waited for by the training thread.
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Iterator

from trainmedic.errors import ConfigurationError

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError:  # the extra "metrics" is not installed
    prometheus_client = None  # type: ignore[assignment]
    Collector = object  # type: ignore[assignment,misc]

_WEIGHT = 0.2  # of the newest report, in the mean from which the throughput is taken
_NAN = float("nan")


class Progress:
    """The last values of each kind. Written by the training thread alone, read by others."""

    __slots__ = ("_samples", "_seconds", "_steps", "_then", "grad_norm", "learning_rate", "loss", "step", "steps")

    def __init__(self) -> None:
        self.step: int | None = None
        self.steps = 0
        self.loss: Any = None
        self.grad_norm: Any = None
        self.learning_rate: Any = None
        self._then: float | None = None
        # Means over the last few reports.
        self._seconds = 0.0
        self._steps = 0.0
        self._samples = 0.0

    def note(
        self, step: int | None, loss: Any, grad_norm: Any, learning_rate: Any, samples: float | None, now: float
    ) -> None:
        """Take in one report. A step that jumped ahead counts for all in between; one that went back, once."""
        last = self.step
        done = step - last if step is not None and last is not None and step > last else 1
        if step is not None:
            self.step = step
        self.steps += done
        if loss is not None:
            self.loss = loss if type(loss) is float else _kept(loss)
        if grad_norm is not None:
            self.grad_norm = grad_norm if type(grad_norm) is float else _kept(grad_norm)
        if learning_rate is not None:
            self.learning_rate = learning_rate
        then = self._then
        self._then = now
        if then is None:
            return
        weight = _WEIGHT if self._seconds else 1.0
        self._seconds += weight * (now - then - self._seconds)
        self._steps += weight * (done - self._steps)
        if samples is not None:
            self._samples += weight * (samples - self._samples)

    def values(self, now: float) -> dict[str, float]:
        """Metric names and values, those that are known. What is not finite is NaN.

        A loss whose gradient norm is not finite is NaN as well: some frameworks log 0.0 then. A report
        that takes longer than usual to come lowers the throughput, so that a loop
        that hangs does not look busy.
        """
        grad_norm = _number(self.grad_norm)
        loss = _number(self.loss)
        if loss is not None and grad_norm is not None and math.isnan(grad_norm):
            loss = _NAN
        found: dict[str, float | None] = {
            "training_loss": loss,
            "gradient_norm": grad_norm,
            "training_learning_rate": _number(self.learning_rate),
        }
        if self._then is not None and self._seconds:
            seconds = max(self._seconds, now - self._then)
            found["training_step_seconds"] = seconds / self._steps
            if self._samples:
                found["training_throughput_samples_per_second"] = self._samples / seconds
        return {name: value for name, value in found.items() if value is not None}


def _kept(value: Any) -> Any:
    """A tensor without its graph, which would otherwise stay in memory until the next report."""
    detach = getattr(value, "detach", None)
    return detach() if callable(detach) else value


def _number(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return _NAN
    return number if math.isfinite(number) else _NAN


_HELP = {
    "training_loss": "Loss of the last reported step.",
    "training_throughput_samples_per_second": "Samples per second, over the last few steps.",
    "gradient_norm": "Norm of the gradient at the last reported step.",
    "training_learning_rate": "Learning rate at the last reported step.",
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
