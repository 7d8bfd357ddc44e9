"""The thread that follows a stream of commands, as the one member of its consumer group.

Every entry goes to ``take``, at least once: an entry that nobody has acknowledged is read again, by this
process or the next one. Redis going away, coming back empty, or losing the group ends nothing.

Who calls it: ``reader`` for a job; the node agent for its node. Not here: what an entry means.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Callable, Mapping

import redis

from trainmedic.wire.connection import FAULTS, Link
from trainmedic.wire.writer import GROUP

log = logging.getLogger("trainmedic")

_BLOCK_MS = 1000
_LOOK_AGAIN = 5.0
"""Seconds after which what is pending is read again: an earlier process may have been given a
command in the moment of its end."""
_COUNT = 100
_BREATH = 0.25
"""Seconds to wait where Redis has answered at once that there is nothing, though it was asked to wait for it."""

Take = Callable[[redis.Redis, bytes, Mapping[bytes, bytes]], None]


class Follower:
    """Reads ``stream`` as ``consumer``. ``who`` is named in the log."""

    def __init__(self, link: Link, stream: str, consumer: str, who: str, take: Take) -> None:
        self._link = link
        self._stream = stream
        self._consumer = consumer
        self._who = who
        self._hand_over = take
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmedic-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Cut the wait for the next command short, so that it goes to the next process, and end."""
        self._stopping.set()
        self._link.cut()
        self._thread.join(timeout)

    def drop(self, client: redis.Redis, entry: bytes) -> None:
        """Take an entry off the stream, unanswered."""
        client.xack(self._stream, GROUP, entry)
        client.xdel(self._stream, entry)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow(self._link.client())
            except FAULTS as error:
                if not self._stopping.is_set():
                    self._stopping.wait(0.1 if "NOGROUP" in str(error) else self._link.broke(error))
            except Exception as error:  # such as an answer of a shape that Redis never gives
                if not self._stopping.is_set():
                    self._stopping.wait(self._link.broke(error))
        self._link.close()

    def _follow(self, client: redis.Redis) -> None:
        try:
            client.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        cursor = "0"  # first what was delivered before, here or to a process that died, and not answered
        looked = time.monotonic()
        while not self._stopping.is_set():
            asked = time.monotonic()
            answer: Any = client.xreadgroup(
                GROUP, self._consumer, {self._stream: cursor}, count=_COUNT, block=_BLOCK_MS
            )
            entries = answer[0][1] if answer else []
            self._link.works()
            for entry, fields in entries:
                self._take_safely(client, entry, fields or {})
            if not entries and cursor == ">" and time.monotonic() - asked < _BLOCK_MS / 2000:
                self._stopping.wait(_BREATH)
            if cursor != ">":
                cursor = entries[-1][0].decode() if entries else ">"
            elif not entries and time.monotonic() - looked > _LOOK_AGAIN:
                cursor, looked = "0", time.monotonic()

    def _take_safely(self, client: redis.Redis, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        """One message that cannot be dealt with does not stop those behind it."""
        try:
            self._hand_over(client, entry, fields)
        except FAULTS:
            raise
        except Exception:
            log.exception("%s: a message among the commands could not be dealt with and is left out", self._who)
            self.drop(client, entry)
