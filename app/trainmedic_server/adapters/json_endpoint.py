"""JSON client for an external HTTP endpoint."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.adapters.httpx_caller import HttpxCaller, read_secret
from trainmedic_server.errors import PermanentFailure, TemporaryFailure

_TIMEOUT = timedelta(seconds=10)
_INVALID_CONTENT_STATUSES = frozenset({400, 413, 422})


class JsonEndpoint:
    def __init__(self, url: str, token_file: Path | None, what: str, flag: str = "its token file") -> None:
        """For errors, `what` names the endpoint and `flag` the token file's setting."""
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        self._url = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        self._basic = base64.b64encode(unquote(user).encode()).decode() if user else None
        self._token_file = token_file
        self._what = what
        self._flag = flag
        self._http = HttpxCaller()

    async def send(self, method: str, path: str, document: Any, media_type: str = "application/json") -> Any:
        """Return the answer's JSON; None if it is not JSON.

        Raises PermanentFailure for rejected content, TemporaryFailure, OutcomeUnknown.
        """
        headers = {"Content-Type": media_type}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {await read_secret(self._token_file, self._flag)}"
        elif self._basic is not None:
            headers["Authorization"] = f"Basic {self._basic}"
        body = json.dumps(document).encode() if document is not None else None
        reply = await self._http.call(
            method, f"{self._url.rstrip('/') if path else self._url}{path}", headers, body, _TIMEOUT
        )
        if 200 <= reply.status < 300:
            try:
                return json.loads(reply.body)
            except UNREADABLE:
                return None
        failure = PermanentFailure if reply.status in _INVALID_CONTENT_STATUSES else TemporaryFailure
        raise failure(f"{self._what} answers with status {reply.status}")

    async def close(self) -> None:
        await self._http.close()
