"""Listeners for history events: starts at ends of runs, effects, CloudEvents, Grafana annotations and traces."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import SecretStr

from trainmedic_server import telemetry
from trainmedic_server.adapters.cloud_events import CloudEvents
from trainmedic_server.adapters.grafana_annotations import GrafanaAnnotations
from trainmedic_server.adapters.json_endpoint import JsonEndpoint
from trainmedic_server.adapters.prometheus_api import PrometheusApi
from trainmedic_server.adapters.run_traces import RunTraces
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.alert import Delivery
from trainmedic_server.engine.effects import EffectMeasuring, EffectRecorder
from trainmedic_server.engine.event_dispatch import EventDispatcher, EventListener
from trainmedic_server.engine.run_ends import RunEnds
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.playbooks import Catalog
from trainmedic_server.settings.server import ServerSettings
from trainmedic_server.wiring.background import Loop


def opened_prometheus(
    settings: ServerSettings, stack: contextlib.AsyncExitStack, on_error: Callable[[], None]
) -> PrometheusApi | None:
    if settings.prometheus is None:
        return None
    prometheus = PrometheusApi(settings.prometheus.get_secret_value(), settings.prometheus_token, on_error)
    stack.push_async_callback(prometheus.close)
    return prometheus


async def listener_loops(
    settings: ServerSettings,
    store: SqlStore,
    catalog: Catalog,
    admit: Callable[[Delivery], Awaitable[object]],
    prometheus: PrometheusApi | None,
    clock: Clock,
    metrics: telemetry.Metrics,
    stack: contextlib.AsyncExitStack,
) -> list[Loop]:
    def endpoint(url: SecretStr, token: Path | None, what: str, flag: str) -> JsonEndpoint:
        made = JsonEndpoint(url.get_secret_value(), token, what, flag)
        stack.push_async_callback(made.close)
        return made

    loops: list[Loop] = []
    listeners: list[EventListener] = [RunEnds(store, catalog, admit, clock)]
    if prometheus is not None:
        listeners.append(EffectRecorder(store, catalog))
        loops.append((EffectMeasuring(store, prometheus, clock, metrics).run(), "effects due"))
    if settings.events_to is not None:
        receiver = endpoint(settings.events_to, settings.events_token, "the receiver of events", "--events-token")
        # Without an external URL, the store's identity distinguishes the events of two clusters.
        source = settings.external_url or f"urn:trainmedic:{await store.identity()}"
        listeners.append(CloudEvents(receiver, source, settings.events_kinds, metrics.events_left_out.inc))
    if settings.grafana is not None:
        grafana = endpoint(settings.grafana, settings.grafana_token, "Grafana", "--grafana-token")
        listeners.append(GrafanaAnnotations(grafana, store, settings.external_url))
    if settings.traces_to is not None:
        collector = endpoint(settings.traces_to, settings.traces_token, "the collector of traces", "--traces-token")
        listeners.append(
            RunTraces(collector, store, await store.identity(), settings.external_url, metrics.spans_left_out.inc)
        )
    return [*loops, *((EventDispatcher(store, store, each, metrics).run(), each.name) for each in listeners)]
