"""What the server writes to Redis: commands, and acknowledgements of replies, in pipelines.

Everything queued in one turn of the event loop goes out together. Who calls it: ``redis_bus``.
Not here: waiting for replies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from redis.asyncio import Redis

from trainmedic.wire import envelope
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import FAULTS, Outage, backoff
from trainmedic_server.ports.fence import Fence
from trainmedic_server.ports.outside import Clock

log = telemetry.logger(__name__)

GROUP = "trainmedic"
STREAM_ENTRIES = 1000
"""A command stream keeps about this many entries at most; receivers delete what they have answered."""
STREAM_SECONDS = 24 * 3600
"""A command stream vanishes this long after the last command in it has expired: its job is gone."""
_CHUNK = 256  # commands per pipeline: few round trips, and the event loop is never held for long
_ACKS = 2048


@dataclass(slots=True)
class Outgoing:
    """A command on its way. `told` is called with the receiver's presence, as it was when it was sent."""

    stream: str
    presence: str
    raw: bytes
    signature: str | None
    expires_at: datetime
    told: Callable[[bytes | None], None]
    is_wanted: Callable[[], bool]
    failures: int = 0
    is_queued: bool = False


class Outbox:
    """Sends what is queued, in order, and keeps trying while Redis is away."""

    def __init__(
        self,
        client: Redis,
        clock: Clock,
        metrics: telemetry.Metrics,
        outage: Outage,
        fence: Fence,
    ) -> None:
        self._client = client
        self._fence = fence
        self._clock = clock
        self._metrics = metrics
        self._outage = outage
        self._commands: deque[Outgoing] = deque()
        self._acks: deque[bytes] = deque()
        self._filled = asyncio.Event()

    def send(self, outgoing: Outgoing) -> None:
        """Queue a command, unless it is queued already."""
        if not outgoing.is_queued:
            outgoing.is_queued = True
            self._commands.append(outgoing)
            self._filled.set()

    def acknowledge(self, entries: Sequence[bytes]) -> None:
        self._acks.extend(entries)
        self._filled.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._commands or self._acks:
                try:
                    await self.flush()
                except FAULTS as error:
                    await asyncio.sleep(self._outage.begin(error))
                except Exception:  # the loop's boundary: a connection can die in ways redis-py has no name for
                    self._metrics.loop_errors.labels(loop="commands").inc()
                    log.exception("command_writer_failed")
                    await asyncio.sleep(1)

    async def flush(self) -> None:
        """Send one pipeline. Where it fails as a whole, everything in it stays queued."""
        self._fence()
        commands = [self._commands.popleft() for _ in range(min(_CHUNK, len(self._commands)))]
        acks = [self._acks.popleft() for _ in range(min(_ACKS, len(self._acks)))]
        now = self._clock.now()
        for command in commands:
            command.is_queued = False
        commands = [command for command in commands if command.is_wanted() and command.expires_at > now]
        if not commands and not acks:
            return
        streams = {command.stream: command for command in commands}
        presences = list({command.presence: None for command in commands})
        pipeline = self._client.pipeline(transaction=False)
        if presences:
            pipeline.execute_command("MGET", *presences)
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
        known = dict(zip(presences, results[0], strict=True)) if presences and isinstance(results[0], list) else {}
        self._conclude(commands, results[1:], known)

    def _conclude(self, commands: list[Outgoing], results: list[Any], presences: dict[str, Any]) -> None:
        for command, result in zip(commands, results, strict=False):
            if isinstance(result, Exception):
                self._again_later(command, result)
            else:
                command.told(presences.get(command.presence))

    def _again_later(self, command: Outgoing, error: Exception) -> None:
        """One stream refuses (wrong type, out of memory): try that one again, without holding up the others."""
        self._outage.count()
        command.failures += 1
        if command.failures == 1:
            log.warning("command_not_taken", error=str(error).partition(" ")[0])
        asyncio.get_running_loop().call_later(backoff(command.failures), self.send, command)


def _xadd(command: Outgoing) -> list[str | bytes | int]:
    entry: list[str | bytes | int] = ["XADD", command.stream, "MAXLEN", "~", STREAM_ENTRIES, "*"]
    entry += ["command", command.raw]
    if command.signature is not None:
        entry += ["signature", command.signature]
    return entry
