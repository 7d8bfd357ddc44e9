"""The log reader's end of the link. Its process ends with it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from trainmedic.errors import described
from trainmedic_agent.errors import CommandNotExecuted, CommandRejected
from trainmedic_agent.log_link.frames import FrameFault, FrameStream, LinkClosed
from trainmedic_agent.log_link.messages import (
    AgentMessage,
    EndReading,
    FailureKind,
    FindingBatch,
    FindingsTaken,
    GpusNow,
    LogMetric,
    Ping,
    Pong,
    QueuedFinding,
    ReaderStatus,
    RulesNow,
    SearchAnswer,
    SearchFailure,
    SearchRequest,
    SearchWithdrawn,
    Welcome,
    agent_message,
    encoded,
)
from trainmedic_agent.log_shipping.store_access import StoreAccess

log = logging.getLogger(__name__)

_LONGEST_REASON = 1000  # characters, as in `SearchFailure`


class ReadingParts(Protocol):
    """See `trainmedic_agent.wiring.agent_logs.LogReading`."""

    def take_rules(self, at: datetime, raw: bytes) -> None: ...

    def search(self, params: Mapping[str, Any], is_stopping: Callable[[], bool]) -> Sequence[str]:
        """Return a page in pieces. Raises CommandRejected, CommandInterrupted."""
        ...

    def status(self) -> ReaderStatus: ...

    def loop_errors(self) -> Mapping[str, int]: ...

    def metrics(self) -> list[LogMetric]: ...


class ReaderEnd:
    def __init__(self, stream: FrameStream) -> None:
        self.stream = stream
        self._changed = threading.Condition()
        self._uuids: Mapping[str, str] = {}  # of GPUs, by PCI address
        self._access = StoreAccess()
        self._rules: RulesNow | None = None  # rules received before the greeting
        self._unacknowledged: set[int] = set()  # numbers of findings sent but not in Redis
        self._searches: queue.Queue[SearchRequest | None] = queue.Queue()
        self._open_searches: set[int] = set()
        self._parts: ReadingParts | None = None
        self.ended = threading.Event()  # set when the link closes or is to end
        self._is_closed = False
        self._receiving = threading.Thread(target=self._receive, name="log-link", daemon=True)
        self._searching = threading.Thread(target=self._run_searches, name="log-search", daemon=True)

    def wait_for_welcome(self) -> Welcome:
        """Raises LinkClosed, FrameFault."""
        while True:
            message = agent_message(self.stream.receive())
            if isinstance(message, Welcome):
                return message
            self._store_news(message)

    def uuid_of(self, address: str) -> str | None:
        return self._uuids.get(address)

    def access(self) -> StoreAccess:
        return self._access

    def serve(self, parts: ReadingParts) -> None:
        self._parts = parts
        if self._rules is not None:
            parts.take_rules(self._rules.at, self._rules.raw)
        self._receiving.start()
        self._searching.start()

    def close(self) -> None:
        self.stream.close()
        self._receiving.join(1.0)

    def send_findings(self, updates: Sequence[tuple[int, bytes]]) -> None:
        """Raises LinkClosed if the link ends first."""
        with self._changed:
            self._unacknowledged = {number for number, _ in updates}
        self.stream.send(encoded(FindingBatch([QueuedFinding(number, body) for number, body in updates])))
        with self._changed:
            self._changed.wait_for(lambda: not self._unacknowledged or self._is_closed)
            if self._unacknowledged:
                raise LinkClosed("the agent has closed the link")

    # --- threads ---

    def _receive(self) -> None:
        try:
            while True:
                self._handle(agent_message(self.stream.receive()))
        except LinkClosed as error:
            log.debug("link to the agent ended", extra={"reason": str(error)})
        except FrameFault as fault:
            log.error("invalid message from the agent; both must have the same release", extra={"reason": str(fault)})
        except Exception:  # thread boundary: the process ends and is restarted
            log.exception("link to the agent failed unexpectedly")
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            self.ended.set()
            self._searches.put(None)

    def _handle(self, message: AgentMessage) -> None:
        assert self._parts is not None
        if isinstance(message, Ping):
            metrics = self._parts.metrics() if message.wants_metrics else None
            pong = Pong(message.number, self._parts.status(), dict(self._parts.loop_errors()), metrics)
            self.stream.send(encoded(pong))
        elif isinstance(message, SearchRequest):
            self._open_searches.add(message.id)
            self._searches.put(message)
        elif isinstance(message, SearchWithdrawn):
            self._open_searches.discard(message.id)
        elif isinstance(message, FindingsTaken):
            with self._changed:
                self._unacknowledged -= set(message.numbers)
                self._changed.notify_all()
        elif isinstance(message, RulesNow):
            self._parts.take_rules(message.at, message.raw)
        elif isinstance(message, EndReading):
            self.ended.set()
        else:
            self._store_news(message)

    def _store_news(self, message: AgentMessage) -> None:
        if isinstance(message, GpusNow):
            self._uuids = message.uuids
        elif isinstance(message, RulesNow):
            self._rules = message
        elif isinstance(message, StoreAccess):
            self._access = message

    def _run_searches(self) -> None:
        while (request := self._searches.get()) is not None:
            try:
                self.stream.send(encoded(self._answer(request)))
            except LinkClosed:
                return
            self._open_searches.discard(request.id)

    def _answer(self, request: SearchRequest) -> SearchAnswer | SearchFailure:
        assert self._parts is not None

        def is_stopping() -> bool:
            return request.id not in self._open_searches or self.ended.is_set()

        try:
            if is_stopping():
                return SearchFailure(request.id, FailureKind.FAILED, "the search was withdrawn")
            return SearchAnswer(request.id, list(self._parts.search(request.params, is_stopping)))
        except CommandNotExecuted as error:
            kind = FailureKind.REJECTED if isinstance(error, CommandRejected) else FailureKind.FAILED
            return SearchFailure(request.id, kind, str(error)[:_LONGEST_REASON])
        except Exception as error:  # boundary: an unexpected error fails one search only
            log.exception("log search failed unexpectedly")
            reason = described(error)
            return SearchFailure(request.id, FailureKind.FAILED, reason[:_LONGEST_REASON])
