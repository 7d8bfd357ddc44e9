"""Socket Mode connection that receives clicks from Slack, reopened whenever it ends.

A click is acknowledged when performed, or after two seconds: Slack waits for three. Repeated clicks are harmless.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import websockets

from trainmedic.wire.backoff import Backoff
from trainmedic_server import errors, telemetry
from trainmedic_server.ports.ending import end_tasks

ACKNOWLEDGE_AFTER = 2.0
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 60.0  # seconds
_STABLE_AFTER = 30.0
"""Seconds after which a connection that Slack ended is reopened at once: it does so every few hours."""
_MOST_CLICKS_AT_ONCE = 20  # no further message is read until one of them is done
_MOST_MESSAGE_BYTES = 1 << 20
_SILENT_LOGGER = logging.getLogger("trainmedic.slack.silent")
_SILENT_LOGGER.disabled = True  # The library logs URLs, which contain tickets.

log = telemetry.logger(__name__)

Handle = Callable[[Mapping[str, Any]], Awaitable[None]]


class SocketMode:
    def __init__(
        self, address: Callable[[], Awaitable[str]], handle: Handle, on_connected: Callable[[bool], None]
    ) -> None:
        self._address = address
        self._handle = handle
        self._on_connected = on_connected
        self._slots = asyncio.Semaphore(_MOST_CLICKS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        backoff = Backoff(_FIRST_RETRY, _LONGEST_RETRY, jitter=True)
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                try:
                    reason = await self._serve_connection()
                    wait = 0.0
                except errors.TrainmedicError as error:
                    reason, wait = str(error), backoff.next()
                except (websockets.WebSocketException, OSError) as error:
                    reason, wait = type(error).__name__, backoff.next()  # Its text may contain the URL.
                except Exception as error:  # Whatever one message does, later clicks must work.
                    places = [f"{each.filename}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)]
                    log.error("the connection to Slack failed", error=type(error).__name__, places=places)
                    reason, wait = type(error).__name__, backoff.next()
                finally:
                    self._on_connected(False)
                if loop.time() - began >= _STABLE_AFTER:
                    backoff.reset()
                elif wait == 0.0:
                    wait = backoff.next()
                log.info("not connected to Slack; connecting again", reason=reason, retry_in=round(wait, 1))
                await asyncio.sleep(wait)
        finally:
            await end_tasks(list(self._tasks))

    async def _serve_connection(self) -> str:
        """Return why the connection ended."""
        address = await self._address()
        async with websockets.connect(
            address,
            logger=_SILENT_LOGGER,
            max_size=_MOST_MESSAGE_BYTES,
            open_timeout=10,
            close_timeout=1,
            ping_timeout=20,
        ) as socket:
            async for raw in socket:
                message = _read(raw)
                match message.get("type"):
                    case "hello":
                        self._on_connected(True)
                        log.info("connected to Slack")
                    case "disconnect":
                        return f"Slack asks for it: {str(message.get('reason', ''))[:100]}"
                    case _ if isinstance(message.get("envelope_id"), str):
                        await self._slots.acquire()
                        task = asyncio.create_task(self._answer(socket, message))
                        self._tasks.add(task)
                        task.add_done_callback(self._done)
        return "the connection was closed"

    async def _answer(self, socket: websockets.ClientConnection, message: Mapping[str, Any]) -> None:
        payload = message.get("payload")
        work = asyncio.ensure_future(self._handle(payload if isinstance(payload, dict) else {}))
        try:
            await asyncio.wait([work], timeout=ACKNOWLEDGE_AFTER)
            try:
                await socket.send(json.dumps({"envelope_id": message["envelope_id"]}))
            except websockets.WebSocketException:
                log.info("cannot acknowledge Slack click; it may be repeated")
            await work
        except Exception:  # One click must not end the connection.
            log.exception("handling Slack click failed")
        finally:
            if not work.done():
                work.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()


def _read(raw: str | bytes) -> Mapping[str, Any]:
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
