"""In-process API client that acts as a principal, with the external checks and limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

from starlette.types import ASGIApp, Message

from trainmedic_server.auth.auth import Principal, vouched
from trainmedic_server.http.problems import HttpProblem

_STREAMED_CHUNKS = 8  # Unread chunks of a streamed answer
_CUT_OFF = "The answer was cut off. The server's log has the cause. Try again."
Query = Mapping[str, Any] | list[tuple[str, Any]]


class InnerApi:
    def __init__(self, app: ASGIApp, principal: Principal) -> None:
        self._app = app
        self._principal = principal

    def acting_as(self, principal: Principal) -> InnerApi:
        return InnerApi(self._app, principal)

    async def get(self, path: str, query: Query | None = None) -> Any:
        return await self.ask("GET", path, query)

    async def post(self, path: str, body: Any = None) -> Any:
        return await self.ask("POST", path, body=body)

    async def get_or(self, default: Any, path: str, query: Query | None = None) -> Any:
        """Return `default` on 404."""
        try:
            return await self.get(path, query)
        except HttpProblem as problem:
            if problem.status == 404:
                return default
            raise

    async def ask(self, method: str, path: str, query: Query | None = None, body: Any = None) -> Any:
        """Return the answer's document, or None if it is empty. Raises HttpProblem for an error."""
        content = b"" if body is None else json.dumps(body).encode()
        status, answer = await self._exchange(_scope(self._principal, method, path, query, content), content)
        document = json.loads(answer) if answer else None
        # `/ready` answers 503 if the server is not ready; this is not an error of the call.
        if status >= 400 and path != "/ready":
            raise _problem(status, document)
        return document

    async def documents(self, path: str, query: Query | None = None) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yield the documents of a streamed answer (NDJSON or server-sent events), None for a heartbeat.

        Raises HttpProblem for an error. Close the generator to stop.
        """
        answer = _StreamedAnswer()
        serving = asyncio.create_task(answer.serve(self._app, _scope(self._principal, "GET", path, query, b"")))
        try:
            rest = b""
            async for chunk in answer.chunks():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b":"):
                        yield None
                    elif line.removeprefix(b"data: ").startswith(b"{"):
                        yield json.loads(line.removeprefix(b"data: "))
            await asyncio.wait({serving})
            if not answer.is_whole:  # the status was sent before the failure, so it reports success
                raise HttpProblem(HTTPStatus.BAD_GATEWAY, _CUT_OFF)
            if answer.status >= 400:
                raise _problem(answer.status, json.loads(rest) if rest else None)
        finally:
            answer.disconnect()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _exchange(self, scope: dict[str, Any], content: bytes) -> tuple[int, bytes]:
        status, parts, sent = 500, [], False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(parts)


class _StreamedAnswer:
    """Answer of a streaming call. The API waits while the queue is full."""

    def __init__(self) -> None:
        self.status = 500
        self.is_whole = False
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue(_STREAMED_CHUNKS)
        self._disconnected = asyncio.Event()

    def disconnect(self) -> None:
        self._disconnected.set()

    async def serve(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            if not self._disconnected.is_set():
                await self._chunks.put(None)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk

    async def _receive(self) -> Message:
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.is_whole = not message.get("more_body", False)
        if message.get("body"):
            await self._chunks.put(message["body"])


def _problem(status: int, document: Any) -> HttpProblem:
    answered = document if isinstance(document, dict) else {}
    problems = [(str(each["field"]), str(each["message"])) for each in answered.get("errors", [])]
    return HttpProblem(status, str(answered.get("detail", "")), problems=problems)


def _scope(principal: Principal, method: str, path: str, query: Query | None, content: bytes) -> dict[str, Any]:
    headers = [(b"host", b"localhost"), (b"accept", b"application/json")]
    if content:
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": urlencode(query or {}, doseq=True).encode(),
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
        **vouched(principal),  # the API trusts it without a token
    }
