"""Deals with the job's commands as they are read, and lets through what the training loop may apply.

What it refuses by itself, with the reply that goes out: a wrong signature or job, bad parameters
(``rejected``), what came too late (``expired``), what was interrupted by the death of an earlier
process (``failed``). What it answers from memory: repeats, and an undo of what was never applied.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any, Callable, Mapping

import redis

from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import parse
from trainmedic.job.queue import NOTHING_TO_UNDO, Answers
from trainmedic.wire import envelope
from trainmedic.wire.connection import Link
from trainmedic.wire.memory import INTERRUPTED, Known, Memory
from trainmedic.wire.stream_reader import Follower

log = logging.getLogger("trainmedic")

LARGEST_COMMAND = 256 * 1024
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
        self._memory = memory
        self._job = job
        self._key = signing_key
        self._waiting = waiting
        self._deliver = deliver
        self._answers = answers
        self._now = now
        self._follower = Follower(link, envelope.job_commands(job), "rank-0", job, self._take)

    def start(self) -> None:
        self._follower.start()

    def stop(self, timeout: float) -> None:
        """Cut the wait for the next command short, so that it goes to the job's next process, and end."""
        self._follower.stop(timeout)

    def _take(self, client: redis.Redis, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        try:
            raw = envelope.body_of(fields, b"command")
            if len(raw) > LARGEST_COMMAND:
                raise envelope.EnvelopeError("the command is too large")
            command = envelope.Command.decode(raw)
        except envelope.EnvelopeError:
            log.warning("%s: an unreadable message was found among the commands and is ignored", self._job)
            self._follower.drop(client, entry)
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
                self._follower.drop(client, entry)

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
