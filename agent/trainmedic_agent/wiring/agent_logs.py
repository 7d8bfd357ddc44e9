"""Parts of the log reader, built in its process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trainmedic_agent.log_link import metric_families
from trainmedic_agent.log_link.messages import LogMetric, ReaderStatus
from trainmedic_agent.log_link.reader_process import is_stopped
from trainmedic_agent.log_opening.node_files import NodeFiles
from trainmedic_agent.log_reading import log_metrics
from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_reading.finding_sender import FindingPort
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_reading.log_reader import LogReader
from trainmedic_agent.log_reading.log_store import NodeBoot
from trainmedic_agent.log_reading.reading_context import ReadingContext
from trainmedic_agent.log_search.searcher import LogSearcher
from trainmedic_agent.log_shipping.store_access import StoreAccess
from trainmedic_core import gpu_names
from trainmedic_core.confined_process import StartsPrograms
from trainmedic_core.program_source import Programs
from trainmedic_logs.files import dump_child, dump_reader

if TYPE_CHECKING:
    from trainmedic_agent.log_shipping.shipper import LogShipping

_MEMORY_OF_DUMPS = 192 * 1024**2  # a dump of 5 MB needs 45 MiB
_LONGEST_ANSWER = 1024**2  # bytes; decoded, it takes ten times as much memory
_LONGEST_PROBLEM = 1000  # characters, as in `ReaderStatus`
_STOPPED = "a signal has stopped the process that opens this node's logs; continue it (SIGCONT), or end it"


class LinkPorts(FindingPort, Protocol):
    """See `ReaderEnd`."""

    def uuid_of(self, address: str) -> str | None: ...  # by normalised PCI address

    def access(self) -> StoreAccess: ...


# Parsers that the reader starts in processes of their own.
PROGRAMS: Programs = {dump_child.__name__: dump_child.run}


def load(policy: LogsPolicy) -> None:
    """Import the policy's modules, because a confined process may be unable to."""
    if policy.ship is not None:
        importlib.import_module("trainmedic_agent.log_shipping.shipper")


class LogReading:
    def __init__(
        self,
        context: ReadingContext,
        policy: LogsPolicy,
        boot: NodeBoot,
        link: LinkPorts,
        files: NodeFiles,
        *,
        takes_rights: bool,
        start_program: StartsPrograms,
    ) -> None:
        """Raises JournalUnavailable."""
        self._context = context
        self._shipping = _shipping(context, policy, boot, files, link)
        arrivals = ArrivalIndex(context.database)
        self._reader = LogReader(
            context,
            policy,
            boot,
            _uuid_by(link),
            read_dumps=partial(
                dump_reader.read_raw,
                most_memory=_MEMORY_OF_DUMPS,
                longest_answer=_LONGEST_ANSWER,
                start=start_program,
            ),
            port=link,
            files=files,
            arrivals=arrivals,
            shipping=self._shipping,
        )
        self._reader.counters.takes_rights = takes_rights
        self._searcher = LogSearcher(policy, context.node, self._reader.scans.scan, arrivals=arrivals, files=files)

    def start(self) -> None:
        """Raises JournalUnavailable."""
        self._reader.start()

    def stop(self, timeout: float) -> None:
        self._reader.stop(timeout)

    def take_rules(self, at: datetime, raw: bytes) -> None:
        self._reader.rules.take(at, raw)

    def search(self, params: Mapping[str, Any], is_stopping: Callable[[], bool]) -> Sequence[str]:
        return self._searcher.packed_page(params, is_stopping)

    def status(self) -> ReaderStatus:
        counters, way = self._reader.counters, self._reader.kernel_way
        return ReaderStatus(
            rules=counters.rules,
            files=sum(counters.files.values()),
            kernel=way.value if way is not None else None,
            waiting=counters.findings_waiting,
            problem=_STOPPED if is_stopped(os.getppid()) else self._reader.problem[:_LONGEST_PROBLEM],
            shipping_problem=self._shipping.counters.problem[:_LONGEST_PROBLEM] if self._shipping else None,
            cuts=[cut.plain() for cut in counters.cuts.cuts()],
            uid=os.geteuid(),
        )

    def loop_errors(self) -> Mapping[str, int]:
        return self._context.counters.loop_errors.all()

    def metrics(self) -> list[LogMetric]:
        families = list(log_metrics.families(self._reader.counters, self._reader.runner.near_misses))
        if self._shipping is not None:
            families += self._shipping.counters.families()
        return metric_families.to_messages(families)


def _shipping(
    context: ReadingContext, policy: LogsPolicy, boot: NodeBoot, files: NodeFiles, link: LinkPorts
) -> LogShipping | None:
    if policy.ship is None:
        return None
    # HTTP and TLS are loaded only if lines are shipped.
    from trainmedic_agent.log_shipping.shipper import LogShipping
    from trainmedic_agent.log_shipping.store_push import StorePush

    return LogShipping(context, policy, policy.ship, boot, StorePush(policy.ship, link.access), files=files)


def _uuid_by(link: LinkPorts) -> Callable[[str], str | None]:
    def uuid(address: str) -> str | None:
        normal = gpu_names.normal_pci(address)
        return link.uuid_of(normal) if normal is not None else None

    return uuid
