from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct
from prometheus_client.metrics_core import Metric

from trainmedic_agent.errors import CommandInterrupted, CommandWithdrawn
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.log_link import metric_families
from trainmedic_agent.log_link.agent_end import AWAY, STARTING, AgentEnd
from trainmedic_agent.log_link.finding_relay import FindingRelay
from trainmedic_agent.log_link.messages import ReaderStatus
from trainmedic_agent.log_link.reader_news import ReaderNews
from trainmedic_agent.log_link.reader_supervisor import ReaderSupervisor
from trainmedic_logs.domain.log_search import READ, WITHDRAW

_THREAD_SECONDS = 0.5  # for a thread to end


# The agent's parts of log reading. The reader process does the reading.
class LinkedReading(Struct, frozen=True):
    link: AgentEnd
    relay: FindingRelay
    news: ReaderNews
    supervisor: ReaderSupervisor

    def start(self) -> None:
        self.link.start()
        self.relay.start()
        self.news.start()
        self.supervisor.start()

    def stop(self, timeout: float) -> None:
        self.supervisor.halt()
        self.link.ask_to_stop()
        self.link.wait_for_end(timeout)
        self.supervisor.stop()
        self.link.stop()
        self.news.stop(_THREAD_SECONDS)
        self.relay.stop(_THREAD_SECONDS)

    def presence(self) -> Mapping[str, Any]:
        status = self.link.status
        values: dict[str, Any] = {"rules": status.rules, "files": status.files}
        if status.kernel is not None:
            values["kernel"] = status.kernel
        if self.relay.clock_error is not None:
            values["clock_error"] = round(self.relay.clock_error, 6)
        if status.waiting:
            values["waiting"] = status.waiting
        if problem := self._problem(status):
            values["problem"] = problem
        if status.shipping_problem is not None:
            values["shipping"] = {"problem": status.shipping_problem} if status.shipping_problem else {}
        if status.cuts:
            values["cuts"] = status.cuts
        return {"logs": values}

    def _problem(self, status: ReaderStatus) -> str:
        if self.link.is_up:
            return status.problem
        return AWAY if self.link.generation or self.supervisor.restarts else STARTING

    def metrics(self) -> Iterator[Metric]:
        yield from metric_families.reader_families(
            is_up=self.link.is_up,
            restarts=self.supervisor.restarts,
            clock_error=self.relay.clock_error,
            uid=self.link.status.uid,
        )
        yield from metric_families.from_messages(self.link.metrics())


class LinkedSearch(Struct, frozen=True):
    link: AgentEnd
    action: str = READ
    queue: str = "logs"
    withdrawal: str = WITHDRAW

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        try:
            return {"page": self.link.search(accepted.command.params, lambda: accepted.is_over)}
        except CommandInterrupted:
            if accepted.is_withdrawn():
                raise CommandWithdrawn("the server withdrew it") from None
            raise
