"""Commands from the engine to the Redis streams of jobs and nodes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec import Struct
from redis.asyncio import Redis

from trainmedic.wire import envelope
from trainmedic.wire.backoff import Backoff
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import RedisOutage, new_backoff, tried_again
from trainmedic_server.adapters.redis_presence import presence_read_command
from trainmedic_server.ports.fence import Fence
from trainmedic_server.ports.outside import Clock

log = telemetry.logger(__name__)

GROUP = "trainmedic"
STREAM_ENTRIES = 1000  # Approximate maximum. Receivers delete answered commands.
STREAM_SECONDS = 24 * 3600  # Lifetime of a stream after its last command's expiry.
_COMMANDS_PER_PIPELINE = 256
_ACKNOWLEDGEMENTS_PER_PIPELINE = 2048


class QueuedCommand(Struct):
    stream: str
    presence: str  # Key of the receiver's presence.
    raw: bytes
    signatures: Mapping[bytes, str]
    expires_at: datetime
    backoff: Backoff | None = None
    is_queued: bool = False

    @property
    def is_wanted(self) -> bool:  # Read immediately before sending.
        return True

    def note_sent(self, presence: bytes | None) -> None:
        """Receive the value of the key `presence`, None if missing or unreadable."""


class CommandOutbox:
    def __init__(
        self,
        client: Redis,
        clock: Clock,
        metrics: telemetry.Metrics,
        outage: RedisOutage,
        fence: Fence,
    ) -> None:
        self._client = client
        self._fence = fence
        self._clock = clock
        self._metrics = metrics
        self._outage = outage
        self._commands: deque[QueuedCommand] = deque()
        self._acks: deque[bytes] = deque()  # Entries of the reply stream, to acknowledge and delete.
        self._filled = asyncio.Event()

    def send(self, command: QueuedCommand) -> None:
        if not command.is_queued:
            command.is_queued = True
            self._commands.append(command)
            self._filled.set()

    def acknowledge(self, entries: Sequence[bytes]) -> None:
        self._acks.extend(entries)
        self._filled.set()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._commands or self._acks:
                messages = "keeping commands for now", "sending commands failed; trying again"
                async with tried_again(log, self._outage, self._metrics, "commands", *messages):
                    await self.flush()

    async def flush(self) -> None:
        """Send one batch. If the pipeline fails as a whole, its content stays queued."""
        self._fence()
        commands = [self._commands.popleft() for _ in range(min(_COMMANDS_PER_PIPELINE, len(self._commands)))]
        acks = [self._acks.popleft() for _ in range(min(_ACKNOWLEDGEMENTS_PER_PIPELINE, len(self._acks)))]
        now = self._clock.now()
        for command in commands:
            command.is_queued = False
        commands = [command for command in commands if command.is_wanted and command.expires_at > now]
        if not commands and not acks:
            return
        streams = {command.stream: command for command in commands}
        presences = list({command.presence: None for command in commands})
        pipeline = self._client.pipeline(transaction=False)
        for presence in presences:
            pipeline.execute_command(*presence_read_command(presence))
        for command in commands:
            pipeline.execute_command(*_xadd(command))
        for stream, command in streams.items():
            seconds = int((command.expires_at - now).total_seconds()) + STREAM_SECONDS
            pipeline.execute_command("EXPIRE", stream, seconds)
        if acks:
            pipeline.execute_command("XACK", envelope.REPLIES, GROUP, *acks)
            pipeline.execute_command("XDEL", envelope.REPLIES, *acks)
        try:
            results = await pipeline.execute(raise_on_error=False)
        except BaseException:
            for command in reversed(commands):
                if not command.is_queued:
                    command.is_queued = True
                    self._commands.appendleft(command)
            self._acks.extendleft(reversed(acks))
            raise
        self._outage.end()
        # Answers are in the order of the calls: presences, commands, and others, which are not read. An error of one
        # presence or stream does not affect the others.
        values = dict(zip(presences, results, strict=False))
        for command, result in zip(commands, results[len(presences) :], strict=False):
            if isinstance(result, Exception):
                self._send_later(command, result)
            else:
                self._outage.refusal = None
                value = values[command.presence]
                command.note_sent(value if isinstance(value, bytes) else None)

    def _send_later(self, command: QueuedCommand, error: Exception) -> None:
        reason = self._outage.note_refusal(error)
        if command.backoff is None:
            command.backoff = new_backoff()
            log.warning("stream refuses command; trying again", error=reason)
        asyncio.get_running_loop().call_later(command.backoff.next(), self.send, command)


def _xadd(command: QueuedCommand) -> list[str | bytes | int]:
    entry: list[str | bytes | int] = ["XADD", command.stream, "MAXLEN", "~", STREAM_ENTRIES, "*"]
    entry += ["command", command.raw]
    for field, signature in command.signatures.items():
        entry += [field, signature]
    return entry
