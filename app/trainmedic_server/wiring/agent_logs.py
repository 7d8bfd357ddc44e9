"""Builds the part of the agent that reads logs. Imported only where the policy says that logs are read.

Who calls it: ``wiring.agent``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric

from trainmedic.wire.steady_time import since_boot
from trainmedic_server.adapters import dump_reader
from trainmedic_server.agent.context import AgentContext
from trainmedic_server.agent.executors import Executor
from trainmedic_server.agent.gpu_record import GpuRecord
from trainmedic_server.agent.log_opening.guarded_files import GuardedFiles
from trainmedic_server.agent.log_opening.node_files import NodeFiles
from trainmedic_server.agent.log_opening.thread_rights import ThreadRights
from trainmedic_server.agent.log_reading import kernel_log, log_metrics, pstore
from trainmedic_server.agent.log_reading.arrivals import ArrivalIndex
from trainmedic_server.agent.log_reading.discovery import PODS
from trainmedic_server.agent.log_reading.log_policy import KernelReading, LogsPolicy
from trainmedic_server.agent.log_reading.log_reader import LogReader, ShipsLines
from trainmedic_server.agent.log_reading.log_store import NodeBoot
from trainmedic_server.agent.log_search.executor import LogReadExecutor
from trainmedic_server.agent.log_search.searcher import LogSearcher
from trainmedic_server.agent.power.control import boot_id
from trainmedic_server.domain import gpu_names
from trainmedic_server.ports.gpus import Gpus

log = logging.getLogger(__name__)

_MEMORY_OF_DUMPS = 192 * 1024**2
"""Address space of the process that reads dumps. One of 5 MB, with 2,000 entries, takes 45 MiB of memory."""
_LONGEST_ANSWER = 1024**2
"""Bytes that the agent takes of that process for one dump. As Python's values they are ten times as many."""


class LogReading:
    """The part as the agent and its exporter know it."""

    def __init__(
        self, reader: LogReader, files: NodeFiles, arrivals: ArrivalIndex, shipping: Shipping | None = None
    ) -> None:
        self._reader = reader
        self.files = files
        """How files are opened, for the search."""
        self.arrivals = arrivals
        """Arrival times of the files' bytes, for the search."""
        self._shipping = shipping

    def start(self) -> None:
        """Raises JournalUnavailable."""
        self._reader.start()

    def stop(self, timeout: float) -> None:
        self._reader.stop(timeout)

    def presence(self) -> Mapping[str, Any]:
        return self._reader.presence()

    def metrics(self) -> Iterator[Metric]:
        yield from log_metrics.families(self._reader.counters, self._reader.runner.near)
        if self._shipping is not None:
            yield from self._shipping.metrics()


class Shipping(ShipsLines, Protocol):
    """What pushes lines to a store, with its metrics."""

    def metrics(self) -> Iterator[Metric]: ...


def log_reading(
    context: AgentContext, policy: LogsPolicy, gpus: Gpus, record: GpuRecord, store_token: str | None = None
) -> LogReading:
    """What reads the logs of this node, and pushes them to a store where the policy names one. Raises
    JournalUnavailable."""
    boot = NodeBoot(context.node, boot_id(), context.now() - timedelta(seconds=since_boot()))
    files = node_files(policy)
    shipping = _shipping(context, policy, boot, files, store_token)
    read_dumps = partial(dump_reader.read_raw, most_memory=_MEMORY_OF_DUMPS, longest_answer=_LONGEST_ANSWER)
    arrivals = ArrivalIndex(context.journal)
    reader = LogReader(
        context,
        policy,
        boot,
        GpusByAddress(gpus, record).uuid,
        read_dumps=read_dumps,
        files=files,
        arrivals=arrivals,
        shipping=shipping,
    )
    reader.counters.takes_rights = files.takes_rights
    return LogReading(reader, files, arrivals, shipping)


def node_files(policy: LogsPolicy) -> GuardedFiles:
    """Return the files of this node that the policy lets be read. They are opened with the rights of the users who
    placed or named them, if this process can take these rights, else by a comparison with the files' modes."""
    tops = [*policy.roots, *policy.paths, *(files.path.base for files in policy.files)]
    tops += [pattern.base for pattern in policy.slurm] + ([PODS] if policy.pods else [])
    if policy.kernel is not None:
        tops += pstore.DIRECTORIES
        if kernel_log.way_of(policy.kernel) is KernelReading.FILE:
            tops.append(policy.kernel.path.rpartition("/")[0])
    return GuardedFiles(tops, switch=thread_rights())


def thread_rights() -> ThreadRights | None:
    """Return the way to take users' rights. None if this process cannot, which is logged."""
    try:
        rights = ThreadRights()
    except OSError as error:
        log.warning("cannot open logs with their users' rights; comparing file modes", extra={"reason": str(error)})
        return None
    if not rights.may_be_used():
        log.warning(
            "cannot open logs with their users' rights; comparing file modes",
            extra={"reason": "CAP_SETUID and CAP_SETGID are missing"},
        )
        return None
    return rights


def _shipping(
    context: AgentContext, policy: LogsPolicy, boot: NodeBoot, files: NodeFiles, store_token: str | None
) -> Shipping | None:
    if policy.ship is None:
        return None
    # An agent that ships nothing loads nothing of what that takes: HTTP, and TLS.
    from trainmedic_server.agent.log_shipping.shipper import LogShipping
    from trainmedic_server.agent.log_shipping.store_push import StorePush

    return LogShipping(context, policy, policy.ship, boot, StorePush(policy.ship, store_token), files=files)


def log_search(context: AgentContext, policy: LogsPolicy, logs: LogReading | None) -> Executor:
    """Return what answers questions about the lines of this node's logs. `logs` is None if no rules read them."""
    files, arrivals = (node_files(policy), None) if logs is None else (logs.files, logs.arrivals)
    return LogReadExecutor(LogSearcher(policy, context.node, arrivals=arrivals, files=files))


class GpusByAddress:
    """Finds a GPU by its PCI address, also one that has fallen off the bus: those that were there are remembered."""

    def __init__(self, gpus: Gpus, record: GpuRecord) -> None:
        self._gpus = gpus
        self._record = record
        self._lock = threading.Lock()
        self._uuids: dict[str, str] = {}

    def uuid(self, address: str) -> str | None:
        """The UUID of the GPU at an address, however that is written; None where none is known."""
        normal = gpu_names.normal_pci(address)
        if normal is None:
            return None
        with self._lock:
            if normal not in self._uuids:
                infos = [known.info for known in self._record.gpus()] + list(self._gpus.inventory().gpus)
                self._uuids = {gpu_names.normal_pci(info.pci_address) or "": info.uuid for info in infos}
            return self._uuids.get(normal)
