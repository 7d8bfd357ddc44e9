"""The thread that writes to Redis: replies, and the presence key that says the job is connected.

The training thread only puts replies into a bounded queue. While Redis is away they wait there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Callable, Mapping, Sequence

import redis

from trainmedic.wire import envelope
from trainmedic.wire.connection import FAULTS, Link
from trainmedic.wire.memory import SECONDS, Known, Memory

log = logging.getLogger("trainmedic")

GROUP = "trainmedic"
PRESENCE_SECONDS = 15
PRESENCE_EVERY = 5.0
STREAM_SECONDS = 24 * 3600
"""The job's command stream vanishes this long after the job did."""
REPLIES_KEPT = 100_000
"""About how many replies wait for a server that is away."""
_QUEUE = 1000
_BATCH = 100
_REFUSALS = 5
LARGEST_REPLY = 64 * 1024


@dataclass(frozen=True)
class Outgoing:
    """Replies to one command on their way. With them ``entry`` is taken off the command stream, the
    outcome is remembered for later repeats (``remember``), or the mark of a command that expired is
    taken away (``forget``)."""

    replies: tuple[envelope.Reply, ...]
    entry: bytes | None = None
    remember: Known | None = None
    forget: bool = False

    @property
    def command_id(self) -> str:
        return self.replies[0].command_id


class Writer:
    """Sends what is put into it, in order, until it is told to stop.

    ``on_written`` is told, in this thread, which replies Redis has taken; with none of them when
    the presence alone was written.
    """

    def __init__(
        self,
        link: Link,
        memory: Memory,
        stream: str,
        presence_key: str,
        describe: Callable[[], Mapping[str, Any]],
        presence_seconds: int = PRESENCE_SECONDS,
        presence_every: float = PRESENCE_EVERY,
        on_written: Callable[[Sequence[Outgoing]], None] | None = None,
        on_rival: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._link = link
        self._memory = memory
        self._stream = stream
        self._presence_key = presence_key
        self._describe = describe
        self._presence_seconds = presence_seconds
        self._presence_every = presence_every
        self._on_written = on_written
        self._on_rival = on_rival
        self._has_announced = False
        self._queue: queue.Queue[Outgoing | None] = queue.Queue(_QUEUE)  # None only wakes the thread up
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmedic-writer", daemon=True)
        self._presence_due = 0.0
        self._refusals = 0

    def start(self) -> None:
        self._thread.start()

    def put(self, outgoing: Outgoing) -> bool:
        """Never waits. Where a thousand replies wait already, this one is left out: the server asks again."""
        try:
            self._queue.put_nowait(outgoing)
        except queue.Full:
            log.error("too many replies wait for Redis; that to %s is left out", outgoing.command_id)
            return False
        return True

    def announce(self) -> None:
        """What the presence says has changed: write it soon."""
        self._presence_due = 0.0
        self._wake()

    def stop(self, timeout: float) -> None:
        """Send what waits, take the presence away, end. Gives up after `timeout` seconds."""
        self._stopping.set()
        self._wake()
        self._thread.join(timeout)

    def _wake(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _run(self) -> None:
        unsent: list[Outgoing] = []
        while True:
            try:
                unsent = unsent or self._collect()
                self._write(unsent)
                unsent = []
                if self._stopping.is_set() and self._queue.empty():
                    self._take_presence_away()
                    break
            except FAULTS as error:
                wait = self._link.broke(error)
                if self._stopping.is_set():
                    break
                unsent = self._give_up_on_refused(unsent, error)
                self._stopping.wait(wait)
            except Exception as error:  # such as an answer of a shape that Redis never gives
                wait = self._link.broke(error)
                if self._stopping.is_set():
                    break
                unsent = self._give_up_on_refused(unsent, error)
                self._stopping.wait(wait)
        self._link.close()

    def _collect(self) -> list[Outgoing]:
        """What is queued by now; waits for it until the presence is due."""
        found: list[Outgoing | None] = []
        wait = 0.0 if self._stopping.is_set() else max(self._presence_due - time.monotonic(), 0.0)
        with contextlib.suppress(queue.Empty):
            found.append(self._queue.get(wait > 0, wait))
            while sum(len(one.replies) for one in found if one is not None) < _BATCH:
                found.append(self._queue.get_nowait())
        return [one for one in found if one is not None]

    def _write(self, replies: list[Outgoing]) -> None:
        is_due = time.monotonic() >= self._presence_due and not self._stopping.is_set()
        if not replies and not is_due:
            return
        client = self._link.client()
        if is_due:
            self._presence_due = time.monotonic() + self._presence_every
        for one in replies:
            if one.forget:
                self._memory.unmark(client, one.command_id)
        if is_due and self._on_rival is not None:
            self._look_for_rival(client)
        with client.pipeline(transaction=True) as pipeline:
            for one in replies:
                self._add(pipeline, one)
            if is_due:
                pipeline.set(self._presence_key, self._presence(), ex=self._presence_seconds)
                pipeline.expire(self._stream, STREAM_SECONDS)
            pipeline.execute()
        self._has_announced = self._has_announced or is_due
        self._refusals = 0
        self._link.works()
        if self._on_written is not None:
            self._on_written(replies)

    def _add(self, pipeline: Any, one: Outgoing) -> None:
        if one.remember is not None:
            pipeline.set(self._memory.key(one.command_id), one.remember.encode(), ex=SECONDS)
        for reply in one.replies:
            raw = reply.encode()
            if len(raw) > LARGEST_REPLY:
                raw = replace(reply, output=too_large(len(raw))).encode()
            pipeline.xadd(envelope.REPLIES, {"reply": raw}, maxlen=REPLIES_KEPT, approximate=True)
        if one.entry is not None:
            pipeline.xack(self._stream, GROUP, one.entry)
            pipeline.xdel(self._stream, one.entry)

    def _give_up_on_refused(self, unsent: list[Outgoing], error: BaseException) -> list[Outgoing]:
        """Redis answers and will not have it (a key of another type, for instance): not for ever."""
        self._presence_due = 0.0
        if isinstance(error, FAULTS) and not isinstance(error, redis.ResponseError):
            return unsent
        self._refusals += 1
        if self._refusals < _REFUSALS:
            return unsent
        self._refusals = 0
        for one in unsent:
            log.error("Redis does not take the reply to %s; it is left out", one.command_id)
        return []

    def _presence(self) -> bytes:
        at = envelope.write_time(datetime.now(timezone.utc))
        return json.dumps({**self._describe(), "at": at}).encode()

    def _look_for_rival(self, client: redis.Redis) -> None:
        """Whether another process has announced itself under this name since this one did. What stood there
        before is that of a predecessor."""
        said = self._said(client)
        if self._on_rival and self._has_announced and said and said.get("instance") != self._memory.owner:
            self._on_rival(said)

    def _take_presence_away(self) -> None:
        """Unless another process of the same job has written its own by now."""
        client = self._link.client()
        if self._said(client).get("instance") == self._memory.owner:
            client.delete(self._presence_key)

    def _said(self, client: redis.Redis) -> Mapping[str, Any]:
        """The presence that stands in Redis; nothing where there is none that can be read."""
        try:
            raw: Any = client.get(self._presence_key)
            said = json.loads(raw) if raw else {}
        except (ValueError, redis.ResponseError):  # somebody else's value, perhaps of another type
            return {}
        return said if isinstance(said, dict) else {}


def too_large(size: int) -> Mapping[str, Any]:
    """The output in place of one that is too large to be kept."""
    return {"reason": f"the output of {size} bytes is too large to be kept"}
