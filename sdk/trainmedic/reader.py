"""The thread that reads the job's commands, and lets through what the training loop may apply.

What it refuses by itself, with the reply that goes out: a wrong signature or job, bad parameters
(``rejected``), what came too late (``expired``), what was interrupted by the death of an earlier
process (``failed``). What it answers from memory: repeats, and an undo of what was never applied.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime
from typing import Any, Callable, Mapping

import redis

from trainmedic import envelope
from trainmedic.answers import Answers
from trainmedic.commands import JobCommand
from trainmedic.link import FAULTS, Link
from trainmedic.memory import INTERRUPTED, Known, Memory
from trainmedic.parameters import parse
from trainmedic.writer import GROUP

log = logging.getLogger("trainmedic")

LARGEST_COMMAND = 256 * 1024
NOTHING_TO_UNDO = {"nothing_to_undo": True}
_BLOCK_MS = 1000
_LOOK_AGAIN = 5.0
"""Seconds after which what is pending is read again: an earlier process of this job may have been
given a command in the moment of its end."""
_COUNT = 100
_MOST_WAITING = 1000


class Reader:
    """Reads as the one member of the stream's consumer group.

    ``deliver`` gets each command to apply; ``waiting`` finds one that was delivered and is not
    answered.
    """

    def __init__(
        self,
        link: Link,
        memory: Memory,
        job: str,
        signing_key: bytes | None,
        waiting: Mapping[str, JobCommand],
        deliver: Callable[[envelope.Command, Any, bytes], None],
        answers: Answers,
        now: Callable[[], datetime],
    ) -> None:
        self._link = link
        self._memory = memory
        self._job = job
        self._stream = envelope.job_commands(job)
        self._key = signing_key
        self._waiting = waiting
        self._deliver = deliver
        self._answers = answers
        self._now = now
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmedic-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Cut the wait for the next command short, so that it goes to the job's next process, and end."""
        self._stopping.set()
        self._link.cut()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow(self._link.client())
            except FAULTS as error:
                if not self._stopping.is_set():
                    self._stopping.wait(0.1 if "NOGROUP" in str(error) else self._link.broke(error))
            except Exception:
                if not self._stopping.is_set():
                    log.exception("reading commands failed")
                    self._stopping.wait(1.0)
        self._link.close()

    def _follow(self, client: redis.Redis) -> None:
        try:
            client.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._link.works()
        cursor = "0"  # first what was delivered before, here or to a process that died, and not answered
        looked = time.monotonic()
        while not self._stopping.is_set():
            answer: Any = client.xreadgroup(GROUP, "rank-0", {self._stream: cursor}, count=_COUNT, block=_BLOCK_MS)
            entries = answer[0][1] if answer else []
            for entry, fields in entries:
                self._take_safely(client, entry, fields or {})
            if cursor != ">":
                cursor = entries[-1][0].decode() if entries else ">"
            elif not entries and time.monotonic() - looked > _LOOK_AGAIN:
                cursor, looked = "0", time.monotonic()

    def _take_safely(self, client: redis.Redis, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        """One message that cannot be dealt with does not stop those behind it."""
        try:
            self._take(client, entry, fields)
        except FAULTS:
            raise
        except Exception:
            log.exception("%s: a message among the commands could not be dealt with and is left out", self._job)
            self._drop(client, entry)

    def _take(self, client: redis.Redis, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        try:
            raw = envelope.body_of(fields, b"command")
            if len(raw) > LARGEST_COMMAND:
                raise envelope.EnvelopeError("the command is too large")
            command = envelope.Command.decode(raw)
        except envelope.EnvelopeError:
            log.warning("%s: an unreadable message was found among the commands and is ignored", self._job)
            self._drop(client, entry)
            return
        try:
            envelope.verify(raw, fields.get(b"signature"), self._key)
            if command.target.get("job") != self._job:
                raise envelope.EnvelopeError("the command is for another job")
        except envelope.EnvelopeError as error:
            log.warning("%s: refused a command: %s", self._job, error)
            self._answer(command.id, envelope.REJECTED, {"reason": str(error)}, entry)
            return
        self._receive(client, entry, command)

    def _receive(self, client: redis.Redis, entry: bytes, command: envelope.Command) -> None:
        """A genuine command: answer it, or let it through."""
        known = self._memory.look_up(client, command.id)
        if known is not None:
            self._repeat(client, entry, command, known)
            return
        if self._now() >= command.expires_at:
            self._answer(command.id, envelope.EXPIRED, {"reason": "it came after it had expired"}, entry)
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._answer(command.id, envelope.REJECTED, {"reason": "too many commands wait already"}, entry)
            return
        try:
            parameters = parse(command.action, command.params)
        except ValueError as error:
            self._remember(command.id, envelope.REJECTED, {"reason": str(error)}, entry)
            return
        if command.undo_of is not None and not self._may_undo(client, command.undo_of):
            self._remember(command.id, envelope.APPLIED, NOTHING_TO_UNDO, entry)
            return
        known = self._memory.claim(client, command.id)
        if known is not None:
            self._repeat(client, entry, command, known)
            return
        self._deliver(command, parameters, entry)
        self._answers.accept(command.id)

    def _repeat(self, client: redis.Redis, entry: bytes, command: envelope.Command, known: Known) -> None:
        if known.is_final:
            self._answers.give(command.id, known, entry)
        elif known.owner != self._memory.owner:
            self._remember(command.id, envelope.FAILED, {"reason": INTERRUPTED}, entry)
        else:
            waiting = self._waiting.get(command.id)
            if waiting is not None:  # the server asks once more, and waits longer
                waiting.expires_at = max(waiting.expires_at, command.expires_at)
                self._answers.tell(command.id, dict(waiting.outcomes))
            if waiting is None or waiting.entry != entry:
                self._drop(client, entry)

    def _may_undo(self, client: redis.Redis, command_id: str) -> bool:
        """Whether there is, or may yet be, something to undo; what waits is decided when its turn has come."""
        known = self._memory.look_up(client, command_id)
        if known is None:
            self._memory.revoke(client, command_id)
            return False
        if known.is_final:
            return known.status == envelope.APPLIED
        return known.owner == self._memory.owner

    def _remember(self, command_id: str, status: str, output: Mapping[str, Any], entry: bytes) -> None:
        known = Known(self._memory.owner, status, output)
        self._memory.note(command_id, known)
        self._answers.give(command_id, known, entry, remember=True)

    def _answer(self, command_id: str, status: str, output: Mapping[str, Any], entry: bytes) -> None:
        self._answers.give(command_id, Known(self._memory.owner, status, output), entry)

    def _drop(self, client: redis.Redis, entry: bytes) -> None:
        client.xack(self._stream, GROUP, entry)
        client.xdel(self._stream, entry)
