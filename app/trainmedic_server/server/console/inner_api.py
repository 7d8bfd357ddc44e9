"""Asks the API within this process, as a client would over a connection, in the name of a principal.

So a page shows exactly what the API answers, by the same checks and bounds, and a form does what the same call does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from starlette.types import ASGIApp, Message

from trainmedic_server.server.auth import Principal, vouched
from trainmedic_server.server.problems import HttpProblem

Query = Mapping[str, Any] | list[tuple[str, Any]]


class InnerApi:
    """`app` is the API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def get(self, principal: Principal, path: str, query: Query | None = None) -> Any:
        """The document at `path`. Raises HttpProblem where the answer is an error."""
        return await self.ask(principal, "GET", path, query)

    async def get_or(self, default: Any, principal: Principal, path: str, query: Query | None = None) -> Any:
        """The same; `default` where there is nothing at `path`."""
        try:
            return await self.get(principal, path, query)
        except HttpProblem as problem:
            if problem.status == 404:
                return default
            raise

    async def ask(
        self, principal: Principal, method: str, path: str, query: Query | None = None, body: Any = None
    ) -> Any:
        """The answer's document; None where it has none. Raises HttpProblem where it is an error."""
        content = b"" if body is None else json.dumps(body).encode()
        status, answer = await self._exchange(_scope(principal, method, path, query, content), content)
        document = json.loads(answer) if answer else None
        # That the server is not ready is what its status says, and no error of the call.
        if status >= 400 and path != "/ready":
            answered = document if isinstance(document, dict) else {}
            problems = [(str(each["field"]), str(each["message"])) for each in answered.get("errors", [])]
            raise HttpProblem(status, str(answered.get("detail", "")), problems=problems)
        return document

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
        **vouched(principal),
    }
