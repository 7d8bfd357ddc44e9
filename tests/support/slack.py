"""A stand-in for Slack: its Web API over HTTP and its Socket Mode over a websocket, on the loopback.

It refuses what Slack refuses, as far as that is documented: wrong tokens and the wrong kind of token; channels that the
app is not in; more than 50 blocks, empty texts, texts of more than 3,000 characters, buttons of more than 75, values of
more than 2,000, block and action ids that are there twice, links of more than 3,000; forms whose title has more than 24
characters or whose metadata has more than 3,000; triggers that are older than three seconds or used; edits of what is
not there; a ticket used twice. What is not acknowledged within three seconds it sends once more, over whichever
connection there is then.

Not modelled: rate limits by method (only those that a test asks for), Slack's way of showing blocks, scopes other than
`scopes_missing`, several workspaces, messages in threads as a thing of their own, the order in which Slack takes
several connections, and every refusal that is not listed above.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import WebSocketException
from websockets.http11 import Request, Response

BOT, APP, CHANNEL = "xoxb-1-bot-s3cret", "xapp-1-app-s3cret", "C0GPUS"
_TRIGGER_SECONDS, _ACKNOWLEDGED_WITHIN = 3.0, 3.0


class Refusal(Exception):
    """What Slack answers with ``ok: false``."""


class Slack:
    """One workspace with one app."""

    def __init__(self) -> None:
        self.messages: dict[str, dict[str, Any]] = {}
        """What was posted, by ``ts``, as it is now."""
        self.edits: list[tuple[str, dict[str, Any]]] = []
        self.whispers: list[dict[str, Any]] = []
        """What only one person was shown."""
        self.forms: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.channels = {CHANNEL}
        self.scopes_missing: set[str] = set()
        self.most_per_page = 1_000
        self.away: str | None = None
        """``down``: 503. ``lost``: carried out, and not answered. ``limited``: 429 once."""
        self.acknowledged: list[str] = []
        self.opened = 0
        self.tried = 0
        """Calls that came while it was down."""
        self._numbers = itertools.count(1)
        self._tickets: set[str] = set()
        self._triggers: dict[str, float] = {}
        self._sockets: list[ServerConnection] = []
        self._waiting: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop
        self._lock = threading.Lock()
        self.url = ""
        self._socket_url = ""

    # --- the Web API ----------------------------------------------------------------------------

    def answer(self, method: str, token: str, document: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.calls.append(method)
            try:
                right_token = APP if method == "apps.connections.open" else BOT
                if token not in (BOT, APP):
                    raise Refusal("invalid_auth")
                if token != right_token:
                    raise Refusal("not_allowed_token_type")
                if method in self.scopes_missing:
                    raise Refusal("missing_scope")
                return {"ok": True, **getattr(self, f"_{method.replace('.', '_')}", _unknown)(document)}
            except Refusal as error:
                self.refused.append((method, str(error)))
                return {"ok": False, "error": str(error)}

    def _apps_connections_open(self, _: dict[str, Any]) -> dict[str, Any]:
        ticket = f"t1cket-{next(self._numbers)}"
        self._tickets.add(ticket)
        return {"url": f"{self._socket_url}/link/?ticket={ticket}&app_id=A1"}

    def _chat_postMessage(self, document: dict[str, Any]) -> dict[str, Any]:
        self._check_message(document, 40_000)
        ts = f"1700000000.{next(self._numbers):06d}"
        self.messages[ts] = document
        return {"channel": document["channel"], "ts": ts, "message": document}

    def post_by_others(self, number: int) -> None:
        with self._lock:
            for _ in range(number):
                self.messages[f"1700000000.{next(self._numbers):06d}"] = {"text": "hello", "channel": CHANNEL}

    def _chat_update(self, document: dict[str, Any]) -> dict[str, Any]:
        self._check_message(document, 4_000)
        ts = document.get("ts", "")
        if ts not in self.messages:
            raise Refusal("message_not_found")
        self.messages[ts] = document
        self.edits.append((ts, document))
        return {"channel": document["channel"], "ts": ts}

    def _chat_postEphemeral(self, document: dict[str, Any]) -> dict[str, Any]:
        self._check_message(document, 40_000)
        self.whispers.append(document)
        return {"message_ts": "1"}

    def _conversations_history(self, document: dict[str, Any]) -> dict[str, Any]:
        if document.get("channel") not in self.channels:
            raise Refusal("channel_not_found")
        begin = int(document.get("cursor") or 0)
        end = begin + min(document.get("limit", 100), self.most_per_page)
        found = [{**each, "ts": ts} for ts, each in reversed(self.messages.items())]
        more = {"response_metadata": {"next_cursor": str(end)}} if end < len(found) else {}
        return {"messages": found[begin:end], "has_more": bool(more), **more}

    def _views_open(self, document: dict[str, Any]) -> dict[str, Any]:
        made = self._triggers.pop(document.get("trigger_id", ""), None)
        if made is None:
            raise Refusal("exchanged_trigger_id")
        if time.monotonic() - made > _TRIGGER_SECONDS:
            raise Refusal("expired_trigger_id")
        view = document["view"]
        if view.get("type") != "modal" or not 1 <= _length(view["title"]["text"]) <= 24:
            raise Refusal("invalid_arguments")
        if _length(view.get("private_metadata", "")) > 3_000:
            raise Refusal("invalid_arguments")
        _check_blocks(view["blocks"], 100)
        self.forms.append(view)
        return {"view": view}

    def _check_message(self, document: dict[str, Any], longest: int) -> None:
        if document.get("channel") not in self.channels:
            raise Refusal("channel_not_found")
        if not document.get("text") and not document.get("blocks"):
            raise Refusal("no_text")
        if _length(document.get("text", "")) > longest:
            raise Refusal("msg_too_long")
        _check_blocks(document.get("blocks", []), 50)

    # --- what people do -------------------------------------------------------------------------

    def button(self, ts: str, action_id: str) -> dict[str, Any] | None:
        """A button of a message as it is shown now."""
        elements = (each for block in self.messages[ts].get("blocks", ()) for each in block.get("elements", ()))
        return next((each for each in elements if each.get("action_id") == action_id), None)

    def press(self, user: str, ts: str, action_id: str, value: str | None = None) -> str:
        """Press a button, or forge a press with another `value`; the envelope's id."""
        button = self.button(ts, action_id) or {"action_id": action_id, "value": ""}
        trigger = f"{next(self._numbers)}.1.abc"
        self._triggers[trigger] = time.monotonic()
        payload = {
            "type": "block_actions",
            "user": {"id": user, "team_id": "T1"},
            "team": {"id": "T1"},
            "trigger_id": trigger,
            "container": {"type": "message", "message_ts": ts, "channel_id": CHANNEL},
            "actions": [{**button, "value": button["value"] if value is None else value, "type": "button"}],
        }
        return self.send(payload)

    def submit(self, user: str, form: Mapping[str, Any], reason: str) -> str:
        """Send a form back; the envelope's id."""
        values = {"reason": {"reason": {"type": "plain_text_input", "value": reason}}}
        kept = {"private_metadata": form["private_metadata"], "callback_id": form["callback_id"]}
        return self.send(
            {"type": "view_submission", "user": {"id": user}, "view": {**kept, "state": {"values": values}}}
        )

    def send(self, payload: Any) -> str:
        """Send an envelope over the newest connection, and again where it is not acknowledged in time."""
        envelope_id = f"e{next(self._numbers)}"
        envelope = {"type": "interactive", "envelope_id": envelope_id, "payload": payload}
        asyncio.run_coroutine_threadsafe(self._deliver(envelope_id, envelope), self._loop)
        return envelope_id

    async def _deliver(self, envelope_id: str, envelope: dict[str, Any]) -> None:
        is_acknowledged = self._waiting[envelope_id] = asyncio.Event()
        for attempt in range(2):
            for socket in reversed(self._sockets):
                try:
                    await socket.send(json.dumps({**envelope, "retry_attempt": attempt}))
                except WebSocketException:
                    continue
                break
            try:
                await asyncio.wait_for(is_acknowledged.wait(), _ACKNOWLEDGED_WITHIN)
            except TimeoutError:
                continue
            self.acknowledged.append(envelope_id)
            return

    def disconnect(self, *, rudely: bool = False) -> None:
        """Ask the app to connect again, or cut the connection without a word."""

        async def work() -> None:
            for socket in list(self._sockets):
                if rudely:
                    socket.transport.abort()
                else:
                    await socket.send(json.dumps({"type": "disconnect", "reason": "refresh_requested"}))

        asyncio.run_coroutine_threadsafe(work(), self._loop).result(60)

    def say(self, raw: str) -> None:
        """Send anything."""
        asyncio.run_coroutine_threadsafe(self._sockets[-1].send(raw), self._loop).result(60)

    @property
    def connections(self) -> int:
        return len(self._sockets)

    # --- the socket -----------------------------------------------------------------------------

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        ticket = parse_qs(urlsplit(request.path).query).get("ticket", [""])[0]
        if ticket not in self._tickets or self.away == "down":
            return connection.respond(http.HTTPStatus.FORBIDDEN, "no such ticket\n")
        self._tickets.discard(ticket)
        return None

    async def _serve_socket(self, socket: ServerConnection) -> None:
        self._sockets.append(socket)
        self.opened += 1
        try:
            await socket.send(json.dumps({"type": "hello", "num_connections": len(self._sockets)}))
            async for raw in socket:
                envelope_id = json.loads(raw)["envelope_id"]
                if envelope_id in self._waiting:
                    self._waiting[envelope_id].set()
        except WebSocketException:
            pass
        finally:
            self._sockets.remove(socket)

    def run(self, started: Future[None], stop: Future[None]) -> None:
        async def work() -> None:
            self._loop = asyncio.get_running_loop()
            async with serve(self._serve_socket, "127.0.0.1", 0, process_request=self._admit) as server:
                self._socket_url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                started.set_result(None)
                await asyncio.wrap_future(stop)

        asyncio.run(work())


def _unknown(_: dict[str, Any]) -> dict[str, Any]:
    raise Refusal("unknown_method")


def _length(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


def _check_blocks(blocks: list[dict[str, Any]], most: int) -> None:
    if len(blocks) > most:
        raise Refusal("invalid_blocks")
    for block in blocks:
        elements = block.get("elements", [])
        texts = (
            [block["text"]]
            if "text" in block
            else [each for each in elements if "text" in each and block["type"] == "context"]
        )
        if any(not 1 <= _length(each["text"]) <= 3_000 for each in texts):
            raise Refusal("invalid_blocks")
        if block["type"] == "actions":
            _check_buttons(elements)
        if block["type"] == "context" and not 1 <= len(elements) <= 10:
            raise Refusal("invalid_blocks")


def _check_buttons(buttons: list[dict[str, Any]]) -> None:
    ids = [button["action_id"] for button in buttons]
    if not 1 <= len(buttons) <= 25 or len(set(ids)) < len(ids):
        raise Refusal("invalid_blocks")
    for button in buttons:
        confirm = button.get("confirm")
        bounds = [(button["text"]["text"], 75), (button["action_id"], 255), (button.get("url", "u"), 3_000)]
        bounds += [(button["value"], 2_000)] if "value" in button else []
        if confirm:
            bounds += [(confirm["title"]["text"], 100), (confirm["text"]["text"], 300)]
            bounds += [(confirm[each]["text"], 30) for each in ("confirm", "deny")]
        if any(not 1 <= _length(text) <= longest for text, longest in bounds):
            raise Refusal("invalid_blocks")


@contextmanager
def slack() -> Iterator[Slack]:
    """The stand-in, while the context lasts."""
    workspace = Slack()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            away = workspace.away
            if away == "down":
                workspace.tried += 1
                return self._send(503, {}, {})
            if away == "limited":
                workspace.away = None
                return self._send(429, {"ok": False, "error": "ratelimited"}, {"Retry-After": "1"})
            method = self.path.removeprefix("/api/")
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            answer = workspace.answer(method, token, json.loads(body))
            return self._send(200, answer, {}) if away != "lost" else None

        def _send(self, status: int, document: Any, headers: Mapping[str, str]) -> None:
            written = json.dumps(document).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(written))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(written)

        def log_message(self, *_: object) -> None: ...

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    workspace.url = f"http://127.0.0.1:{web.server_port}/api"
    started: Future[None] = Future()
    stop: Future[None] = Future()
    threads = [
        threading.Thread(daemon=True, target=web.serve_forever),
        threading.Thread(target=workspace.run, args=(started, stop)),
    ]
    for thread in threads:
        thread.start()
    started.result(60)
    try:
        yield workspace
    finally:
        stop.set_result(None)
        web.shutdown()
        web.server_close()
        for thread in threads:
            thread.join()
