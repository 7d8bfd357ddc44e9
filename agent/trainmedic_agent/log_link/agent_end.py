"""The agent's end of the link to one log reader at a time.

A message that is neither an answer nor the one outstanding batch of findings closes the link: a hostile reader must
cost little.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainmedic.wire.log_limit import LogLimit
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.errors import CommandFailed, CommandInterrupted, CommandRejected
from trainmedic_agent.log_link.frames import FrameFault, FrameStream, LinkClosed
from trainmedic_agent.log_link.link_socket import LinkSocket, Peer
from trainmedic_agent.log_link.messages import (
    LARGEST_OF_READER,
    AgentMessage,
    EndReading,
    FailureKind,
    FindingBatch,
    LogMetric,
    Ping,
    Pong,
    ReaderMessage,
    ReaderStatus,
    SearchAnswer,
    SearchFailure,
    SearchRequest,
    SearchWithdrawn,
    encoded,
    reader_message,
)

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 15.0  # seconds without a pong after which the reader is killed
SEARCH_SECONDS = 30.0  # limit of a search
CONNECT_SECONDS = 5.0  # seconds that a search waits for a reader
METRICS_SECONDS = 1.0  # wait for new metrics
_CHECK_SECONDS = 0.2  # between looks whether a search is to stop
_JOIN_SECONDS = 1.0  # for the thread to end
_MOST_WITHDRAWN = 100  # searches that may still be answered
_MOST_LOOPS = 16  # loops with counted errors: a hostile reader could invent names
_MOST_LOOP_ERRORS = 16  # errors of a loop counted per pong
# Problems shown in the agent's presence. A search fails with the second.
STARTING = "the log reader process of this node has not connected yet"
AWAY = "the log reader process of this node does not answer; restarting it"


class AgentEnd:
    def __init__(
        self,
        socket: LinkSocket,
        counters: AgentCounters,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self.offer: Callable[[FindingBatch, int], bool] | None = None  # see `FindingRelay`
        self._counters = counters
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._stream: FrameStream | None = None
        self._peer: Peer | None = None
        self.generation = 0  # number of connections so far
        self.status = ReaderStatus()  # the reader's last, empty without a reader
        self._metrics: Sequence[LogMetric] = ()
        self._pings: dict[int, float] = {}  # monotonic times of unanswered pings, by number
        self._number = 0
        self._searches: dict[int, SearchAnswer | SearchFailure | None] = {}  # None: not answered yet
        self._withdrawn: set[int] = set()  # given up, but may still be answered
        self._loop_errors: dict[str, int] = {}  # of this reader, counted so far, by loop
        self._is_greeted = False  # True once `ReaderNews` has sent policy and GPUs
        self._has_answered = False
        self._stopping = threading.Event()
        self._log_limit = LogLimit()
        self._thread = threading.Thread(target=self._run, name="log-link", daemon=True)

    # --- called by the agent's threads ---

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        self.send(EndReading())

    def wait_for_end(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stream is None, timeout)

    def stop(self) -> None:
        self._stopping.set()
        self._socket.wake()
        self.drop()
        self._thread.join(_JOIN_SECONDS)
        self._socket.close()

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    @property
    def is_up(self) -> bool:
        """True once the reader has answered a heartbeat."""
        return self._stream is not None and self._has_answered

    def send(self, message: AgentMessage, generation: int | None = None) -> bool:
        """Return False if the reader of this generation (None: the current one) is gone."""
        with self._changed:
            stream = self._stream
            if stream is None or generation not in (None, self.generation):
                return False
        try:
            stream.send(encoded(message))
        except LinkClosed as error:
            self._log_event("link to the log reader closed", str(error))
            return False
        return True

    def wait_for_another(self, generation: int, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.generation != generation, timeout)

    def greet(self, messages: Sequence[AgentMessage], generation: int) -> None:
        """Send the first messages. Pings and searches wait for this."""
        if all(self.send(message, generation) for message in messages):
            with self._changed:
                self._is_greeted = generation == self.generation and self._stream is not None
                self._changed.notify_all()

    def beat(self) -> bool:
        """Send a heartbeat; False if the reader hangs, which is then killed."""
        now = self._monotonic()
        with self._changed:
            if self._stream is None or not self._is_greeted:
                return True
            oldest = min(self._pings.values(), default=now)
        if now - oldest > HEARTBEAT_SECONDS:
            self._log_event("ending log reader", f"it did not answer for {HEARTBEAT_SECONDS:g} s")
            self.kill()
            return False
        self._ping(wants_metrics=False)
        return True

    def kill(self) -> None:
        with self._changed:
            peer = self._peer
            if peer is not None:
                peer.kill()
        self.drop()

    def drop(self) -> None:
        with self._changed:
            stream = self._stream
        if stream is not None:
            stream.close()

    def metrics(self) -> Sequence[LogMetric]:
        """Return the reader's metrics, the last known if it does not answer in time, none without a greeted reader."""
        number = self._ping(wants_metrics=True)
        if number is None:
            return ()
        with self._changed:
            self._changed.wait_for(lambda: number not in self._pings, METRICS_SECONDS)
            return self._metrics

    def search(self, params: Mapping[str, Any], is_stopping: Callable[[], bool]) -> list[str]:
        """Return the page in pieces. Raises CommandRejected, CommandFailed, CommandInterrupted."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_greeted or is_stopping(), CONNECT_SECONDS):
                raise CommandFailed(AWAY)
            self._number += 1
            number, generation = self._number, self.generation
            self._searches[number] = None
        try:
            if not self.send(SearchRequest(number, dict(params)), generation):
                raise CommandFailed(AWAY)
            answer = self._wait_for_answer(number, generation, is_stopping)
        finally:
            with self._changed:
                is_open = self._searches.pop(number) is None and self.generation == generation
                if is_open and len(self._withdrawn) < _MOST_WITHDRAWN:
                    self._withdrawn.add(number)
            if is_open:
                self.send(SearchWithdrawn(number), generation)
        if isinstance(answer, SearchAnswer):
            return answer.pieces
        if answer.kind is FailureKind.REJECTED:
            raise CommandRejected(answer.reason)
        raise CommandFailed(answer.reason)

    def _wait_for_answer(
        self, number: int, generation: int, is_stopping: Callable[[], bool]
    ) -> SearchAnswer | SearchFailure:
        until = time.monotonic() + SEARCH_SECONDS
        with self._changed:
            while (answer := self._searches[number]) is None:
                if self._stream is None or self.generation != generation:
                    raise CommandFailed(AWAY)
                if is_stopping():
                    raise CommandInterrupted("the agent stops")
                if time.monotonic() > until:
                    raise CommandFailed(f"the log reader did not answer within {SEARCH_SECONDS:g} s")
                self._changed.wait(_CHECK_SECONDS)
        return answer

    def _ping(self, *, wants_metrics: bool) -> int | None:
        """Return the number, if sent."""
        with self._changed:
            if not self._is_greeted:
                return None
            self._number += 1
            number, generation = self._number, self.generation
            self._pings[number] = self._monotonic()
        return number if self.send(Ping(number, wants_metrics), generation) else None

    # --- receiving thread ---

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                accepted = self._socket.accept()
                if accepted is not None:
                    self._serve(FrameStream(accepted[0], LARGEST_OF_READER), accepted[1])
            except OSError as error:
                if not self._stopping.is_set():
                    log.error("cannot accept log reader connections", extra={"reason": error.strerror or str(error)})
                self._stopping.wait(1.0)
            except Exception:  # thread boundary: a broken link must not prevent the next
                log.exception("link to the log reader continues after an unexpected error")
                self._counters.loop_errors.add("log-link")
                self._stopping.wait(1.0)

    def _serve(self, stream: FrameStream, peer: Peer) -> None:
        with self._changed:
            self._stream, self._peer = stream, peer
            self.generation += 1
            self._pings.clear()
            self._withdrawn.clear()
            self._loop_errors = dict.fromkeys(self._loop_errors, 0)
            self._changed.notify_all()
        reason = ""
        try:
            while not self._stopping.is_set():
                self._handle(reader_message(stream.receive()))
        except LinkClosed as error:
            reason = str(error)
        except FrameFault as fault:
            reason = str(fault)
            self._log_event("ending log reader: protocol violation", reason)
            peer.kill()
        finally:
            with self._changed:
                self._stream = self._peer = None
                self._is_greeted = self._has_answered = False
                self.status, self._metrics = ReaderStatus(), ()
                self._changed.notify_all()
            stream.release()
            peer.close()
        log.info("link to the log reader ended", extra={"reason": reason})

    def _handle(self, message: ReaderMessage) -> None:
        """Raises FrameFault."""
        if isinstance(message, FindingBatch):
            if self.offer is None or not self.offer(message, self.generation):
                raise FrameFault("findings arrived before earlier ones were acknowledged")
            return
        with self._changed:
            if isinstance(message, Pong):
                self._handle_pong(message)
            elif message.id in self._searches:
                if self._searches[message.id] is not None:
                    raise FrameFault("a search was answered twice")
                self._searches[message.id] = message
            elif message.id in self._withdrawn:
                self._withdrawn.discard(message.id)
            else:
                raise FrameFault("an answer belongs to no search")
            self._changed.notify_all()

    def _handle_pong(self, pong: Pong) -> None:
        if self._pings.pop(pong.number, None) is None:
            raise FrameFault("a heartbeat was answered that was not sent")
        self.status = pong.status
        self._has_answered = True
        if pong.metrics is not None:
            self._metrics = pong.metrics
        for loop, count in pong.loop_errors.items():
            if loop not in self._loop_errors and len(self._loop_errors) >= _MOST_LOOPS:
                continue
            if (fresh := count - self._loop_errors.get(loop, 0)) > 0:
                self._counters.loop_errors.add(loop, min(fresh, _MOST_LOOP_ERRORS))
            self._loop_errors[loop] = count

    def _log_event(self, event: str, reason: str) -> None:
        if self._log_limit.lets_through():
            log.warning(event, extra={"reason": reason})
