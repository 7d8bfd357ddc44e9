"""Builds all parts of the server, starts them in order, and stops them in reverse.

Order: the run store, whose lock excludes a second server; Redis; playbooks; the engine; last the listener. With
PostgreSQL the listener starts first, as a standby.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from trainmedic.wire.signing import Signer
from trainmedic_core.target import TargetKind
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_server import __version__, telemetry
from trainmedic_server.actions import registry
from trainmedic_server.adapters import file_inventory
from trainmedic_server.adapters.alertmanager_api import SETTLES_AFTER, AlertmanagerApi
from trainmedic_server.adapters.embedded_redis import EmbeddedRedis
from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.adapters.kubernetes_pods import KubernetesPods
from trainmedic_server.adapters.kubernetes_topology import KubernetesTopology
from trainmedic_server.adapters.playbook_test_process import PlaybookTestProcess
from trainmedic_server.adapters.prometheus_api import PrometheusApi
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.redis_capacity import RedisCapacity, check_is_no_cluster
from trainmedic_server.adapters.redis_inbox import LateReply
from trainmedic_server.adapters.slurm_agent import SlurmAgent
from trainmedic_server.adapters.slurm_rest import SlurmRest
from trainmedic_server.adapters.slurm_topology import SlurmWatch
from trainmedic_server.adapters.sql_store import postgresql
from trainmedic_server.adapters.sql_store.election import Election
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.api.findings import FindingsApi
from trainmedic_server.api.playbook_versions import PlaybookTextsApi
from trainmedic_server.auth import auth
from trainmedic_server.auth.browser_sessions import Sessions
from trainmedic_server.auth.identity import TrustedProxies
from trainmedic_server.catalog import alert_map_roots, modes_file
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.topology import NO_SLURM, ClusterTopology, SlurmTopology, WrittenTopology
from trainmedic_server.engine.agent_watch import AgentWatch
from trainmedic_server.engine.job_watch import JobWatch
from trainmedic_server.engine.kept_jobs import KeptJobs
from trainmedic_server.engine.runbooks import Runbooks
from trainmedic_server.engine.service import Engine
from trainmedic_server.engine.service_watch import ServiceState, ServiceWatch
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.engine.topology_watch import TopologyWatch
from trainmedic_server.errors import ActionFailure, BusUnavailable
from trainmedic_server.http import factory, listener
from trainmedic_server.http.base_path import BasePath
from trainmedic_server.http.limits import ConnectionLimits, ServerLimits
from trainmedic_server.http.standby import Standby, SwitchableApp
from trainmedic_server.live.job_location import JobLocations
from trainmedic_server.live.log_lines import LogLinesApi
from trainmedic_server.live.now import NowApi
from trainmedic_server.ports.actions import Actions, Services
from trainmedic_server.ports.archive import RunArchive
from trainmedic_server.ports.cluster import Cluster
from trainmedic_server.ports.fence import Fence
from trainmedic_server.ports.job_pods import JobPods, NoPods
from trainmedic_server.ports.outside import UNSIGNED, Notifier
from trainmedic_server.ports.slurm import Slurm
from trainmedic_server.ports.store import RunStore
from trainmedic_server.reports.compiling import ReportCompiler
from trainmedic_server.reports.reported_figures import ReportedFigures
from trainmedic_server.settings.server import ServerSettings
from trainmedic_server.wiring import interpreter, notifications
from trainmedic_server.wiring.background import opened_archive, prune_for_ever, run_in_background
from trainmedic_server.wiring.event_listeners import listener_loops, opened_prometheus
from trainmedic_server.wiring.findings import FindingParts, log_rule_library
from trainmedic_server.wiring.log_source import log_source
from trainmedic_server.wiring.notifications import slack_loops

if TYPE_CHECKING:
    from fastapi import FastAPI  # which `http.factory` imports in its own way

# Longest wait at the start for the first answer of each of Slurm, Redis and the Kubernetes API: the first alerts, which
# need their data, may come at once.
_FIRST_LOOK_SECONDS = 2.0

log = telemetry.logger(__name__)


async def connect_redis(
    settings: ServerSettings, stack: contextlib.AsyncExitStack, metrics: telemetry.Metrics
) -> tuple[str, Callable[[], str]]:
    """Return Redis's URL, and a function for a caveat about it. Start the embedded Redis if none is configured.

    Raises ConfigurationError.
    """
    if settings.redis is not None:
        url, caveat = settings.redis.get_secret_value(), ""
        await check_is_no_cluster(url)
    else:
        embedded = EmbeddedRedis(settings.state_dir)
        url = await embedded.start()
        stack.push_async_callback(embedded.stop)
        if caveat := embedded.caveat:
            log.warning("embedded Redis is outdated", reason=caveat)
    capacity = RedisCapacity(url, metrics, caveat)
    run_in_background(stack, (capacity.watch(), "room in Redis"))
    return url, capacity.caveat


_SHORT_KEY = 16  # characters


def signer_of(settings: ServerSettings) -> Signer | None:
    """Return None without a key. Log a warning for a missing or short one."""
    if settings.signing_key is None:
        log.warning(UNSIGNED)
        return None
    length = len(settings.signing_key.get_secret_value().strip())
    if length < _SHORT_KEY:
        log.warning("signing key is too short; use at least 16 random characters", length=length)
    return settings.signer


def needs_locations(catalog: Library, rules: LogRuleLibrary) -> bool:
    """Return whether playbooks or log findings need locations of jobs, GPUs and nodes."""
    # Locations serve to read labels, to find a job's GPUs, and to count the breaker's nodes.
    has_target = any(each.definition.target_kind is not TargetKind.CLUSTER for each in catalog.all())
    return has_target or bool(rules.rule_set.rules)


class TrainmedicServer:
    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._clock = SystemClock()
        self._metrics = telemetry.Metrics()
        self._archive: RunArchive | None = None
        self._job_watch: JobWatch | None = None  # None before the work starts

    async def run(self, stop: asyncio.Event, on_started: Callable[[str, int], None] | None = None) -> None:
        """Serve until `stop` is set. Call `on_started` with the address once requests are answered.

        Raises ConfigurationError, StoreUnavailable.
        """
        settings = self._settings
        self._archive = await opened_archive(settings.archive)
        if postgresql.is_postgresql(settings.database_url):
            await self._run_elected(stop, on_started)
        else:
            began = asyncio.get_running_loop().time()

            def listening(host: str, port: int) -> None:
                self._log_ready(began, host=host, port=port)
                if on_started is not None:
                    on_started(host, port)

            async with self._started() as api:
                await listener.serve(api, settings.host, settings.port, stop, listening, self._connections())
        log.info("stopped")

    async def _run_elected(self, stop: asyncio.Event, on_started: Callable[[str, int], None] | None) -> None:
        settings = self._settings
        self._authenticator()  # built only for its checks: invalid tokens end the process before a request is answered
        if settings.redis is None and settings.advertise is not None:
            log.warning("embedded Redis is not shared: after a takeover, agents and jobs are lost; set --redis")
        election = Election(settings.database_url, settings.takeover, settings.advertise or "")
        standby = Standby(election, settings.mode, BasePath(settings.external_url), self._clock, self._metrics)
        app = SwitchableApp(standby)

        def listening(host: str, port: int) -> None:
            log.info("listening", host=host, port=port, version=__version__)
            if on_started is not None:
                on_started(host, port)

        limits = self._connections()
        serving = asyncio.create_task(listener.serve(app, settings.host, settings.port, stop, listening, limits))
        is_over = asyncio.Event()
        working = asyncio.create_task(self._work_once_elected(election, app, is_over))
        try:
            await asyncio.wait([serving, working], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Let requests in progress end before the engine that they use stops.
            stop.set()
            await asyncio.wait([serving])
            is_over.set()
            working.cancel()
            await asyncio.wait([working])
        for task in (serving, working):
            if not task.cancelled():
                task.result()

    async def _work_once_elected(self, election: Election, app: SwitchableApp, is_over: asyncio.Event) -> None:
        session = await election.win()
        began = asyncio.get_running_loop().time()
        async with self._started(session) as api:
            app.switch_to(api)
            self._log_ready(began)
            # Wait for the event too: a cancellation of this task may be lost while the server starts.
            await is_over.wait()

    def _log_ready(self, began: float, **address: Any) -> None:
        seconds = round(asyncio.get_running_loop().time() - began, 3)
        state = {"version": __version__, **interpreter.described(), "mode": self._settings.mode}
        log.info("ready", **address, **state, seconds=seconds)
        interpreter.warn_of_gil()

    @contextlib.asynccontextmanager
    async def _started(self, session: postgresql.LockSession | None = None) -> AsyncIterator[FastAPI]:
        """`session` has the PostgreSQL lock; None with SQLite."""
        settings, clock, metrics, authenticator = self._settings, self._clock, self._metrics, self._authenticator()
        written = file_inventory.load(settings.inventory) if settings.inventory else WrittenTopology()
        limits = settings.limits
        if settings.modes:
            limits = replace(limits, target_modes=modes_file.load(settings.modes))

        async with contextlib.AsyncExitStack() as stack:
            store = await self._opened(stack, session, authenticator)
            redis_url, redis_caveat = await connect_redis(settings, stack, metrics)
            signer, alerts = signer_of(settings), self._alertmanager(stack)
            # The engine is made below, because it needs the bus; replies come once both have started.
            late: LateReply = lambda reply: engine.record_late_reply(reply)  # noqa: E731
            bus = RedisBus(redis_url, clock, metrics, signer, on_late_reply=late, fence=store.fence)
            cluster, cluster_topology, pods = await self._cluster(stack, store.fence)
            prometheus = opened_prometheus(settings, stack, metrics.prometheus_errors.inc)
            slurm = self._slurm(stack, bus, store.fence)
            slurm_watch = SlurmWatch(slurm, clock, metrics) if slurm is not None else None
            slurm_topology = slurm_watch.topology if slurm_watch is not None else lambda: NO_SLURM
            services = await self._services(
                stack, bus, alerts, cluster, cluster_topology, slurm, slurm_topology, prometheus, written
            )
            catalog, rules, alert_map = await self._loaded(actions := registry.build(services))
            notifications.warn_of_missing_channels(settings, catalog)
            presences, is_needed = SharedPresences(bus), functools.partial(needs_locations, catalog, rules)
            watch = TopologyWatch(presences, clock, metrics, is_needed, written, cluster_topology, slurm_topology)
            topology, job_locations = watch.topology, JobLocations(bus, store, cluster_topology)
            engine = Engine(
                store,
                catalog,
                actions,
                clock,
                limits,
                metrics,
                topology=topology,
                alert_source=alerts,
                fence=store.fence,
                clock_watch=clock,
                alert_map=lambda: alert_map.current,
                renew_topology=watch.renew,
            )
            job_lives = await self._start_work(stack, bus, store, watch, engine, slurm_watch)
            shared = (settings, redis_url, store, engine, rules, watch, alerts, clock, metrics, signer, prometheus)
            await FindingParts(*shared, pods).start(stack)
            await self._start_upkeep(stack, catalog, store, engine, services.notifier, prometheus)
            run_in_background(stack, (alert_map.watch(), "alert map"))
            missing = notifications.missing_channels(settings)
            watched = self._start_service_watches(stack, alerts, prometheus)
            reported = ReportedFigures(presences, clock)
            run_in_background(stack, (reported.watch(metrics), "reported figures"))
            yield factory.create_app(
                engine=engine,
                job_lives=job_lives,
                runs=store,
                report_compiler=ReportCompiler(store, prometheus, store, clock, store, reported),
                alerts=store,
                now_api=NowApi(store, store, engine, clock, settings.external_url, missing),
                findings_api=FindingsApi(store, KeptJobs(store, clock), store, job_locations),
                lines=LogLinesApi(log_source(settings.log_store, stack, bus, clock), job_locations),
                store=store,
                catalog=catalog,
                texts=PlaybookTextsApi(store, PlaybookTestProcess()),
                messaging=notifications.channels_of(settings, store, services.notifier, clock),
                log_rules=rules,
                alert_map=alert_map,
                runbooks=Runbooks(settings.runbooks),
                bus=bus,
                presences=presences,
                redis_caveat=redis_caveat,
                cluster_topology=cluster_topology,
                slurm_topology=slurm_watch.topology if slurm_watch is not None else None,
                services=watched,
                metrics=metrics,
                auth=authenticator,
                clock=clock,
                clock_watch=clock,
                allowed_hosts=(settings.host, *settings.allowed_hosts),
                limits=ServerLimits(body_bytes=settings.max_body, large_bytes=max(4 * settings.max_body, 32 << 20)),
            )

    async def _start_upkeep(
        self,
        stack: contextlib.AsyncExitStack,
        catalog: Library,
        store: SqlStore,
        engine: Engine,
        notifier: Notifier | None,
        prometheus: PrometheusApi | None,
    ) -> None:
        settings, clock, metrics = self._settings, self._clock, self._metrics
        messages = await notifications.message_loops(
            settings, store, notifier, clock, metrics, lambda: catalog.problems
        )
        run_in_background(stack, *messages)  # first: the calls below may raise and leave the coroutines unawaited
        in_slack = slack_loops(settings, store, engine, metrics, stack)
        after = await listener_loops(settings, store, catalog, engine.admit, prometheus, clock, metrics, stack)
        pruning = prune_for_ever(store, clock, metrics, lambda: engine.ago(settings.retention), self._archive)
        upkeep = ((catalog.watch(), "playbooks"), (pruning, "retention"), (metrics.watch_event_loop(), "event loop"))
        run_in_background(stack, *upkeep, *in_slack, *after)

    def _start_service_watches(
        self, stack: contextlib.AsyncExitStack, alertmanager: AlertmanagerApi | None, prometheus: PrometheusApi | None
    ) -> dict[str, Callable[[], ServiceState]]:
        states = {}
        for name, service in (("alertmanager", alertmanager), ("prometheus", prometheus)):
            if service is not None:
                watch = ServiceWatch(name, service.check, self._clock, self._metrics)
                run_in_background(stack, (watch.watch(), name))
                states[name] = watch.state
        return states

    async def _loaded(self, actions: Actions) -> tuple[Library, LogRuleLibrary, AlertMapLibrary]:
        catalog = Library(self._settings.playbooks, actions, metrics=self._metrics)
        rules = log_rule_library(self._settings)
        await asyncio.to_thread(catalog.reload)
        await asyncio.to_thread(rules.reload)
        alert_map = AlertMapLibrary(alert_map_roots.roots(self._settings.alert_map, {}), self._metrics)
        await asyncio.to_thread(alert_map.reload)
        return catalog, rules, alert_map

    async def _start_work(
        self,
        stack: contextlib.AsyncExitStack,
        bus: RedisBus,
        store: RunStore,
        topology: TopologyWatch,
        engine: Engine,
        slurm: SlurmWatch | None,
    ) -> JobWatch:
        await bus.start()
        stack.push_async_callback(bus.close)
        if slurm is not None:
            with contextlib.suppress(ActionFailure, TimeoutError):  # `watch` logs it, and tries again
                async with asyncio.timeout(_FIRST_LOOK_SECONDS):
                    await slurm.refresh()
            run_in_background(stack, (slurm.watch(), "slurm"))
        presences, settings = topology.presences, self._settings
        agent_lives = AgentWatch(presences, store, self._clock, self._metrics, engine.ago, retention=settings.retention)
        # Do this before the first delivery, so that nodes whose agents are gone are known.
        await agent_lives.load()
        topology.remembered = agent_lives.names
        with contextlib.suppress(BusUnavailable, TimeoutError):  # `watch` logs it, and tries again
            async with asyncio.timeout(_FIRST_LOOK_SECONDS):
                await topology.refresh()
        run_in_background(stack, (topology.watch(), "topology"))
        await engine.start(notifications.name_among_several(self._settings))
        stack.push_async_callback(engine.stop)
        self._job_watch = job_lives = JobWatch(presences, store, self._clock, self._metrics, engine.ago)
        topology.slurm_ids = job_lives.slurm_ids
        run_in_background(stack, (job_lives.watch(), "jobs"))
        run_in_background(stack, (agent_lives.watch(), "agents"))
        self._metrics.working.set(1)
        stack.callback(self._metrics.working.set, 0)
        return job_lives

    def _authenticator(self) -> auth.Authenticator:
        """Raise ConfigurationError if the address must not be served without tokens."""
        settings = self._settings
        proxies = TrustedProxies(settings.trusted_proxies, settings.operator_groups)
        if settings.tokens:
            authenticator = auth.Authenticator.from_file(settings.tokens, proxies)
        else:
            authenticator = auth.Authenticator(proxies=proxies)
        auth.check_exposure(settings.host, authenticator.has_tokens, settings.allow_anonymous)
        return authenticator

    async def _opened(
        self,
        stack: contextlib.AsyncExitStack,
        session: postgresql.LockSession | None,
        authenticator: auth.Authenticator,
    ) -> SqlStore:
        on_error = self._metrics.store_errors.inc
        if session is not None:
            store = await asyncio.to_thread(SqlStore.of_session, session, on_error=on_error)
        else:
            store = await asyncio.to_thread(SqlStore.open, self._settings.database_url, on_error=on_error)
        stack.push_async_callback(store.close)
        if authenticator.has_tokens:
            authenticator.sessions = Sessions(store, self._clock)
            await authenticator.sessions.load()
        return store

    def _connections(self) -> ConnectionLimits:
        return ConnectionLimits(per_client=self._settings.connections_per_client)

    async def _services(
        self,
        stack: contextlib.AsyncExitStack,
        bus: RedisBus,
        alertmanager: AlertmanagerApi | None,
        cluster: Cluster | None,
        cluster_topology: Callable[[], ClusterTopology],
        slurm: Slurm | None,
        slurm_topology: Callable[[], SlurmTopology],
        prometheus: PrometheusApi | None,
        written: WrittenTopology,
    ) -> Services:
        settings = self._settings
        http = HttpxCaller({name: value.get_secret_value() for name, value in settings.http_secrets.items()})
        stack.push_async_callback(http.close)
        return Services(
            clock=self._clock,
            bus=bus,
            http=http,
            notifier=notifications.notifier_of(settings),
            external_url=settings.external_url,
            routes=settings.routes,
            alertmanager=alertmanager,
            cluster=cluster,
            cluster_topology=cluster_topology,
            slurm=slurm,
            slurm_topology=slurm_topology,
            metrics=prometheus,
            may_connect=lambda job: self._job_watch is None or self._job_watch.may_connect(job),
            inventory_of=lambda node: written.attributes_by_node.get(node, {}),
            slurm_id_of=lambda job: self._job_watch.slurm_ids().get(job) if self._job_watch else None,
        )

    def _alertmanager(self, stack: contextlib.AsyncExitStack) -> AlertmanagerApi | None:
        settings = self._settings
        if settings.alertmanager is None:
            return None
        url = settings.alertmanager.get_secret_value()
        # Well before a silent alert counts as resolved.
        settles_after = min(SETTLES_AFTER, settings.assume_resolved_after / 4)
        alertmanager = AlertmanagerApi(url, self._clock, settings.alertmanager_token, settles_after)
        stack.push_async_callback(alertmanager.close)
        return alertmanager

    def _slurm(self, stack: contextlib.AsyncExitStack, bus: RedisBus, fence: Fence) -> Slurm | None:
        settings = self._settings
        if settings.slurm_agent is not None:
            return SlurmAgent(bus, self._clock, settings.slurm_agent, fence)
        if settings.slurm_url is None:
            return None
        slurm = SlurmRest(settings.slurm_url, settings.slurm_user, settings.slurm_token, settings.slurm_ca, fence)
        stack.push_async_callback(slurm.close)
        return slurm

    async def _cluster(
        self, stack: contextlib.AsyncExitStack, fence: Fence
    ) -> tuple[Cluster | None, Callable[[], ClusterTopology], JobPods]:
        if self._settings.kubernetes == "off":
            return None, ClusterTopology, NoPods()
        # Imported here, because its client takes a third of a second to import, and few servers have a cluster.
        from trainmedic_server.adapters.kubernetes_cluster import KubernetesCluster

        cluster = await KubernetesCluster.opened(self._settings.kubeconfig, fence=fence)
        stack.push_async_callback(cluster.close)
        if not self._settings.kubernetes_watch:
            return cluster, ClusterTopology, NoPods()
        pods = KubernetesPods(cluster, self._clock, self._metrics)
        watched = KubernetesTopology(cluster, self._clock, self._metrics, pods)
        run_in_background(stack, (watched.watch(), "cluster"))
        run_in_background(stack, (pods.watch(), "pods"))
        with contextlib.suppress(TimeoutError):  # Until it answers, no node counts as unknown.
            async with asyncio.timeout(_FIRST_LOOK_SECONDS):
                await watched.filled.wait()
        return cluster, watched.topology, pods
