# The agent's side of reading logs: the link to the process that reads them, and its supervision.

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import trainmedic_agent
from trainmedic.wire.connection import OutageLog
from trainmedic.wire.steady_time import since_boot
from trainmedic_agent.context import AgentContext
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.log_link import reader_process
from trainmedic_agent.log_link.agent_end import AgentEnd
from trainmedic_agent.log_link.finding_relay import FindingRelay
from trainmedic_agent.log_link.link_socket import LinkSocket
from trainmedic_agent.log_link.linked_reading import LinkedReading, LinkedSearch
from trainmedic_agent.log_link.messages import Welcome
from trainmedic_agent.log_link.reader_directory import prepare
from trainmedic_agent.log_link.reader_news import ReaderNews
from trainmedic_agent.log_link.reader_process import ReaderUser
from trainmedic_agent.log_link.reader_supervisor import ReaderSupervisor
from trainmedic_agent.log_link.rule_news import RuleNews
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_reading.log_store import NodeBoot
from trainmedic_agent.ports.gpus import Gpus
from trainmedic_agent.power.control import boot_id
from trainmedic_agent.settings.agent import AgentSettings, ReaderStart
from trainmedic_core import gpu_names

log = logging.getLogger(__name__)


def linked_reading(
    settings: AgentSettings, context: AgentContext, policy: LogsPolicy, gpus: Gpus, record: GpuRecord
) -> tuple[LinkedReading, LinkedSearch]:
    """Raises ConfigurationError, JournalUnavailable."""
    user, reason = chosen_user(settings)
    if reason is not None:
        log.warning("reading logs as the agent's own user", extra={"reason": reason, "user": user.uid})
    prepare(settings.state_dir, context.journal, user)
    outage = OutageLog(f"logs of node {context.node}", "findings wait")
    link = AgentEnd(LinkSocket(settings.state_dir, user.uid, user.gid), context.counters)
    relay = FindingRelay(
        context.node,
        context.redis.shared(outage),
        context.signer,
        RuleNews(context.node, context.signer),
        link.send,
        lambda: context.now().timestamp(),
    )
    link.offer = relay.offer
    boot = NodeBoot(context.node, boot_id(), context.now() - timedelta(seconds=since_boot()))
    news = ReaderNews(
        link,
        relay,
        Welcome(policy, boot),
        GpusByAddress(gpus, record).uuids,
        settings.log_store_token,
        context.counters,
    )
    start = partial(reader_process.start, settings.state_dir, user, settings.reader_memory, settings.log_level)
    is_child = settings.reader is ReaderStart.CHILD
    supervisor = ReaderSupervisor(link, start if is_child else None, context.counters)
    return LinkedReading(link, relay, news, supervisor), LinkedSearch(link)


def chosen_user(settings: AgentSettings) -> tuple[ReaderUser, str | None]:
    """Return the user for reading logs, and why it is the agent's own, unless so set. Raises ConfigurationError."""
    is_child = settings.reader is ReaderStart.CHILD
    program = [Path(trainmedic_agent.__file__)] if is_child else []
    return reader_process.usable_user(settings.reader_user, [settings.state_dir, *program], is_started=is_child)


class GpusByAddress:
    """GPUs by PCI address, including remembered ones off the bus."""

    def __init__(self, gpus: Gpus, record: GpuRecord) -> None:
        self._gpus = gpus
        self._record = record
        self._uuids: dict[str, str] = {}

    def uuids(self) -> Mapping[str, str]:
        for info in [*(known.info for known in self._record.gpus()), *self._gpus.inventory().gpus]:
            normal = gpu_names.normal_pci(info.pci_address)
            if normal is not None:
                self._uuids[normal] = info.uuid
        return dict(self._uuids)
