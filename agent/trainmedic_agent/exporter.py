"""Prometheus metrics of GPUs and agent.

While a slow driver blocks one scrape, others return the agent's metrics without GPUs.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import parse_qs, urlsplit

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from trainmedic.errors import ConfigurationError
from trainmedic_agent import gpu_metrics
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.errors import GpuError, GpuStuck
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.metric_family import by_label, counter, gauge
from trainmedic_agent.metrics_server import MetricsServer
from trainmedic_agent.ports.gpus import GpuInfo, GpuReading, Gpus, Inventory
from trainmedic_agent.power.caps import GpuPowerState

_REUSED_SECONDS = 0.5  # age up to which readings serve another scrape
_WAIT_SECONDS = 3.0  # wait for another scrape's readings; Prometheus times out after 10 s
_CONNECTED_SECONDS = 25.0  # since Redis's last answer: the presence is sent every 10 s


class _Seen(Struct, frozen=True):
    inventory: Inventory = Inventory()
    readings: Sequence[tuple[GpuInfo, GpuReading]] = ()
    stuck: Mapping[GpuInfo, bool] = {}


class AgentCollector(Collector):
    """`power`: recorded power states by UUID; `more`: metrics of other parts."""

    def __init__(
        self,
        gpus: Gpus,
        power: Callable[[], Mapping[str, GpuPowerState]],
        counters: AgentCounters,
        agent_labels: Mapping[str, str],
        record: GpuRecord,
        more: Callable[[], Iterator[Metric]] = lambda: iter(()),
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = gpus
        self._power = power
        self._counters = counters
        self._agent_labels = dict(agent_labels)
        self._record = record
        self._more = more
        self._now = now
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._seen = _Seen()  # replaced, never changed: a scrape in progress shows the one it began with
        self._failures: Counter[tuple[GpuInfo, str]] = Counter()  # by GPU and reading; "all" if none succeeded

    def collect(self) -> Iterator[Metric]:
        seen = self._refresh()
        yield from self._agent((seen or self._seen).inventory.driver)
        yield from self._more()
        if seen is not None:
            yield from gpu_metrics.families(seen.readings)
        yield from gpu_metrics.record_families(self._record.gpus())
        yield from self._gpu_failures(seen)
        yield from self._caps()

    def _refresh(self) -> _Seen | None:
        # None if another scrape's reading takes too long.
        if not self._lock.acquire(timeout=_WAIT_SECONDS):
            self._counters.scrapes.add("late")
            return None
        try:
            if self._monotonic() - self._read_at < _REUSED_SECONDS:
                return self._seen
            inventory, readings = self._gpus.inventory(), []
            stuck = dict.fromkeys(inventory.gpus, False)
            for info in inventory.gpus:
                try:
                    reading = self._gpus.read(info.uuid)
                except GpuError as error:
                    self._failures[info, "all"] += 1
                    stuck[info] = isinstance(error, GpuStuck)
                    continue
                readings.append((info, reading))
                for name in reading.unread:
                    self._failures[info, name] += 1
            self._record.observe(inventory, readings, self._gpus.xids())
            self._seen = _Seen(inventory, readings, stuck)
            self._read_at = self._monotonic()
            return self._seen
        finally:
            self._lock.release()

    def _agent(self, driver: str | None) -> Iterator[Metric]:
        agent_labels = {**self._agent_labels, "driver": driver or ""}
        yield InfoMetricFamily("trainmedic_agent", "Identity of the agent, and the driver version.", agent_labels)
        answered_at = self._counters.redis_answered_at
        connected = answered_at is not None and self._now() - answered_at < _CONNECTED_SECONDS
        yield GaugeMetricFamily(
            "trainmedic_agent_redis_connected", "1 while Redis accepts its messages.", int(connected)
        )
        commands = sorted(self._counters.commands.all().items())
        yield counter("trainmedic_agent_commands", "Answered commands.", ["action", "status"], commands)
        faults = by_label(self._counters.loop_errors.all())
        yield counter(
            "trainmedic_agent_loop_errors", "Unexpected errors that a background loop survived.", ["loop"], faults
        )

    def _gpu_failures(self, seen: _Seen | None) -> Iterator[Metric]:
        missing = GaugeMetricFamily("trainmedic_agent_gpus_missing", "GPUs, or the driver, that do not respond.")
        if seen is not None:
            missing.add_metric([], len(seen.inventory.problems) + sum(seen.stuck.values()))
        yield missing
        stuck = seen.stuck if seen is not None else {}
        yield gauge(
            "trainmedic_agent_gpu_stuck",
            "1 for a GPU with a driver call that has not returned.",
            gpu_metrics.LABELS,
            ((gpu_metrics.labels(info), int(is_stuck)) for info, is_stuck in stuck.items()),
        )
        failures = self._failures.copy().items()
        yield counter(
            "gpu_reading_errors",
            "Supported readings that failed.",
            [*gpu_metrics.LABELS, "reading"],
            (([*gpu_metrics.labels(info), reading], count) for (info, reading), count in failures),
        )
        yield CounterMetricFamily(
            "trainmedic_agent_late_scrapes",
            "Scrapes without GPUs, because the driver was too slow.",
            self._counters.scrapes.all()["late"],
        )

    def _caps(self) -> Iterator[Metric]:
        caps = GaugeMetricFamily("trainmedic_agent_power_caps", "Active power caps of a GPU.", labels=["uuid"])
        ends = GaugeMetricFamily(
            "trainmedic_agent_power_lease_end_timestamp_seconds",
            "End of the first lease of a GPU's caps, unless renewed.",
            labels=["uuid"],
        )
        owed = GaugeMetricFamily(
            "trainmedic_agent_power_owed",
            "1 for a GPU with a pending change of its limit: a restore or a cap.",
            labels=["uuid"],
        )
        for uuid, state in sorted(self._power().items()):
            caps.add_metric([uuid], len(state.active))
            owed.add_metric([uuid], int(state.needs_reconciling))
            if state.active:
                ends.add_metric([uuid], min(cap.lease_until for cap in state.active))
        yield from (caps, ends, owed)


class Exporter:
    """HTTP endpoint with the metrics on every path."""

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        """Listen. Raises ConfigurationError for an unusable address."""
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            self._server = MetricsServer(host, port, partial(_page, registry))
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve metrics on {host}, port {port}: {error.strerror or error}. Is another exporter "
                "running there? Choose another port with --exporter-port"
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="exporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Named(Collector):
    # `CollectorRegistry.restricted_registry` knows no names of a collector that does not describe itself beforehand.

    def __init__(self, registry: CollectorRegistry, names: Collection[str]) -> None:
        self._registry = registry
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if sample.name in self._names]
            if family.samples:
                yield family


def _page(registry: CollectorRegistry, path: str, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
    names = parse_qs(urlsplit(path).query).get("name[]")
    shown: Collector = _Named(registry, frozenset(names)) if names else registry
    encode, content_type = choose_encoder(accept)
    content: bytes = encode(shown)
    if "gzip" not in accept_encoding:
        return {"Content-Type": content_type}, content
    return {"Content-Type": content_type, "Content-Encoding": "gzip"}, gzip.compress(content)
