"""A training loop with the SDK, in a thread, and what tests ask of it and of Redis: those of the bus and the SDK."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis

import trainmedic
from tests.support.messages import KEY
from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command, Reply
from trainmedic_server.adapters.redis_bus import RedisBus


class TrainingLoop:
    """A training loop in a thread: it steps every few milliseconds and carries out what `act` says."""

    def __init__(self, url: str, act: Callable[[trainmedic.JobCommand], None] | None = None, **options: Any) -> None:
        self.medic = trainmedic.connect(job="llm-1", redis_url=url, **options)
        self.done: list[str] = []
        self._act = act or (lambda command: command.applied())
        self._over = threading.Event()
        self._held = threading.Event()
        self._thread = threading.Thread(daemon=True, target=self._train)
        self._thread.start()

    def hold(self) -> None:
        """A step that takes long: nothing is picked up until `go_on`."""
        self._held.set()

    def go_on(self) -> None:
        self._held.clear()

    def _train(self) -> None:
        step = 0
        while not self._over.wait(0.002):
            if self._held.is_set():
                continue
            step += 1
            self.medic.report(step=step, loss=1.0)
            for command in self.medic.commands(step):
                self.done.append(command.id)
                self._act(command)

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self.medic.close()


def again(sent: Command, seconds: float = 60.0) -> Command:
    """The same command, asked for once more with more time."""
    fields = {name: getattr(sent, name) for name in sent.__dataclass_fields__}
    return Command(**{**fields, "expires_at": datetime.now(UTC) + timedelta(seconds=seconds)})


async def ask(bus: RedisBus, sent: Command) -> Reply:
    """The one final reply."""
    (reply,) = await bus.request(sent)
    bus.acknowledge(sent.id)
    return reply


async def put(client: Redis, sent: Command, key: str | None = KEY) -> None:
    """Put a command on the stream by hand, as a server or an attacker would."""
    fields: dict[str, Any] = {"command": sent.encode()}
    if key is not None:
        fields["signature"] = envelope.sign(sent.encode(), key.encode())
    await client.xadd(envelope.job_commands("llm-1"), fields)


async def finals(client: Redis, command_id: str, count: int = 1, seconds: float = 60.0) -> list[Reply]:
    """The final replies to a command that are on the stream, once there are that many."""
    async with asyncio.timeout(seconds):
        while True:
            entries = await client.xrange(envelope.REPLIES)
            replies = [Reply.decode(fields[b"reply"]) for _, fields in entries if b"reply" in fields]
            found = [reply for reply in replies if reply.command_id == command_id and reply.is_final]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.005)


async def eventually(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            value = holds()
            if await value if asyncio.iscoroutine(value) else value:
                return
            await asyncio.sleep(0.005)


async def until(moment: datetime) -> None:
    await asyncio.sleep(max(0.0, (moment - datetime.now(UTC)).total_seconds()))


async def is_empty(client: Redis, stream: str) -> bool:
    return await client.xlen(stream) == 0
