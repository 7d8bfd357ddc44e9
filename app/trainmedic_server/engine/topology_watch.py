"""Where jobs run, kept up from what they and the agents say of themselves, for the resolution of targets.

A delivery does not wait for Redis: what is answered is a few seconds old. What cannot be read anew for a
minute is forgotten, for a target is rather refused than guessed. Nothing is read while no playbook asks.

Who calls it: ``wiring`` runs it beside the engine, and hands `known` to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from trainmedic_server import telemetry
from trainmedic_server.domain import gpu_names
from trainmedic_server.domain.topology import Gpu, Known, gpus_in, one_or_all, ranks_in
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.outside import Clock, CommandBus, Pods, Presence

REFRESH_EVERY = timedelta(seconds=5)
"""As often as a job writes its presence."""
FORGET_AFTER = timedelta(minutes=1)
MOST = 200_000
"""Ranks or GPUs that are kept at most, whatever is in Redis; some tens of MB."""

log = telemetry.logger(__name__)


class TopologyWatch:
    """`written` is what a file says; `pods` what is known of a cluster, where there is one."""

    def __init__(
        self,
        bus: CommandBus,
        clock: Clock,
        metrics: telemetry.Metrics,
        is_wanted: Callable[[], bool],
        written: Known | None = None,
        cluster: Callable[[], Known] = dict,
        pods: Pods | None = None,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._metrics = metrics
        self._is_wanted = is_wanted
        self._written: Known = written or {}
        self._cluster = cluster
        self._pods = pods
        self._told: Known = {}
        self._gpus: Mapping[str, Gpu] = {}
        self._said: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        self._as_of: datetime | None = None

    def known(self) -> Known:
        return _Everything((self._written, self._told, _OnGpus(self._gpus, self._pods), self._cluster()))

    async def watch(self) -> None:
        """Keep up until cancelled."""
        while True:
            try:
                await self.refresh()
            except BusUnavailable as error:
                self._grow_old(error)
            except Exception:  # the loop's boundary
                self._metrics.loop_errors.labels("whereabouts").inc()
                log.exception("where jobs run could not be read; trying again")
            await self._clock.sleep_until(self._clock.now() + REFRESH_EVERY)

    async def refresh(self) -> None:
        """Read everything anew, if anybody wants to know. Raises BusUnavailable."""
        if not self._is_wanted():
            self._forget()
            return
        jobs, agents = await asyncio.gather(self._bus.jobs(), self._bus.agents())
        said = (
            {job.name: job.details.get("placement") for job in jobs},
            {agent.name: agent.details.get("gpus") for agent in agents},
        )
        if said != self._said:
            # For thousands of ranks this takes a tenth of a second, which deliveries should not wait for.
            self._told, self._gpus = await asyncio.to_thread(_read, jobs, agents)
            self._said = said
        self._as_of = self._clock.now()

    def _grow_old(self, error: BusUnavailable) -> None:
        if self._as_of is not None and self._clock.now() - self._as_of > FORGET_AFTER:
            log.warning("where jobs run is not known any more while Redis is away", error=str(error))
            self._forget()

    def _forget(self) -> None:
        self._told, self._gpus, self._said, self._as_of = {}, {}, None, None


def _read(jobs: Sequence[Presence], agents: Sequence[Presence]) -> tuple[Known, Mapping[str, Gpu]]:
    """What the jobs have told, and the GPUs by each of their keys."""
    ranks = [rank for job in jobs for rank in ranks_in(job.name, job.details)][:MOST]
    gpus = [gpu for agent in agents for gpu in gpus_in(agent.name, agent.details)][:MOST]
    by_key = {key: gpu for gpu in gpus for key in gpu.names()}
    told: dict[str, set[str]] = {}
    for rank in ranks:
        told.setdefault(f"told:node:{rank.node}", set()).add(rank.job)
        if rank.gpu is None:
            continue
        key = gpu_names.key(rank.gpu, rank.node)
        for name in {key, *(by_key[key].names() if key in by_key else ())}:
            told.setdefault(f"told:gpu:{name}", set()).add(rank.job)
    return {key: one_or_all(names) for key, names in told.items()}, by_key


class _OnGpus(Known):
    """``gpu:<key>``: the jobs of the pods that an agent sees on a GPU. Looked up when it is asked for, because
    the pods of a large cluster change all the time."""

    def __init__(self, gpus: Mapping[str, Gpu], pods: Pods | None) -> None:
        self._gpus = gpus
        self._pods = pods

    def __getitem__(self, key: str) -> str | tuple[str, ...]:
        gpu = self._gpus.get(key.removeprefix("gpu:")) if key.startswith("gpu:") else None
        if gpu is None or self._pods is None:
            raise KeyError(key)
        pods = [pod for uid in gpu.pods if (pod := self._pods.pod(uid)) is not None]
        jobs = {pod.job for pod in pods if pod.job is not None}
        if not jobs:
            raise KeyError(key)
        return one_or_all(jobs)

    def __iter__(self) -> Iterator[str]:
        return (key for name in self._gpus if (key := f"gpu:{name}") in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Everything(Known):
    """The first of several that has a key has the word."""

    def __init__(self, layers: tuple[Known, ...]) -> None:
        self._layers = layers

    def __getitem__(self, key: str) -> str | tuple[str, ...]:
        for layer in self._layers:
            found = layer.get(key)
            if found is not None:
                return found
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter({key: None for layer in self._layers for key in layer})

    def __len__(self) -> int:
        return sum(1 for _ in self)
