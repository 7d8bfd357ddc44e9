"""Listeners for history events: starts at ends of runs, effects, CloudEvents, Grafana annotations and traces."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

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
) -> list[tuple[Coroutine[Any, Any, None], str]]:
    loops: list[tuple[Coroutine[Any, Any, None], str]] = []  # with the names of their tasks
    listeners: list[EventListener] = [RunEnds(store, catalog, admit, clock)]
    if prometheus is not None:
        listeners.append(EffectRecorder(store, catalog))
        loops.append((EffectMeasuring(store, prometheus, clock, metrics).run(), "effects due"))
    if settings.events_to is not None:
        endpoint = JsonEndpoint(
            settings.events_to.get_secret_value(), settings.events_token, "the receiver of events", "--events-token"
        )
        stack.push_async_callback(endpoint.close)
        # Without an external URL, the store's identity distinguishes the events of two clusters.
        source = settings.external_url or f"urn:trainmedic:{await store.identity()}"
        listeners.append(CloudEvents(endpoint, source, settings.events_kinds, metrics.events_left_out.inc))
    if settings.grafana is not None:
        endpoint = JsonEndpoint(
            settings.grafana.get_secret_value(), settings.grafana_token, "Grafana", "--grafana-token"
        )
        stack.push_async_callback(endpoint.close)
        listeners.append(GrafanaAnnotations(endpoint, store, settings.external_url))
    if settings.traces_to is not None:
        endpoint = JsonEndpoint(
            settings.traces_to.get_secret_value(), settings.traces_token, "the collector of traces", "--traces-token"
        )
        stack.push_async_callback(endpoint.close)
        instance = await store.identity()
        listeners.append(RunTraces(endpoint, store, instance, settings.external_url, metrics.spans_left_out.inc))
    return [*loops, *((EventDispatcher(store, store, each, metrics).run(), each.name) for each in listeners)]
