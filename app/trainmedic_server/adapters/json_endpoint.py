"""JSON client for an external HTTP endpoint."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.adapters.httpx_caller import Endpoint
from trainmedic_server.errors import PermanentFailure, TemporaryFailure

_TIMEOUT = timedelta(seconds=10)
_INVALID_CONTENT_STATUSES = frozenset({400, 413, 422})


class JsonEndpoint:
    def __init__(self, url: str, token_file: Path | None, what: str, flag: str = "its token file") -> None:
        """For errors, `what` names the endpoint and `flag` the token file's setting."""
        self._what = what
        self._endpoint = Endpoint(url, token_file, flag)
        self.close = self._endpoint.close

    async def send(self, method: str, path: str, document: Any, media_type: str = "application/json") -> Any:
        """Return the answer's JSON; None if it is not JSON.

        Raises PermanentFailure for rejected content, TemporaryFailure, OutcomeUnknown.
        """
        headers = {"Content-Type": media_type, **await self._endpoint.authorization()}
        body = json.dumps(document).encode() if document is not None else None
        reply = await self._endpoint.call(method, path, headers, body, _TIMEOUT)
        if 200 <= reply.status < 300:
            try:
                return json.loads(reply.body)
            except UNREADABLE:
                return None
        failure = PermanentFailure if reply.status in _INVALID_CONTENT_STATUSES else TemporaryFailure
        raise failure(f"{self._what} answers with status {reply.status}")
