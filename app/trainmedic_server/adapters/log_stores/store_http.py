"""HTTP client of log stores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from trainmedic_core.setting_sources import unreadable_file
from trainmedic_server.adapters.foreign_answers import UNREADABLE, no_cookies
from trainmedic_server.errors import LogQueryRefused, LogsUnavailable

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_ANSWERS_WITHIN = 60.0  # Seconds. Each byte could arrive just within `_TIMEOUT`.
_MOST_BYTES = 64 * 1024 * 1024
LONGEST_REASON = 300  # Characters.
_BEARER_OPTION = "token_file of --log-store"


class StoreHttp:
    """Calls raise LogsUnavailable, or LogQueryRefused for a query that the store rejects as invalid."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        token_file: Path | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._headers = dict(headers)
        self._token_file = token_file
        # No compression: a small answer could expand to any size.
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Accept-Encoding": "identity"},
            cookies=no_cookies(),
            timeout=_TIMEOUT,
            transport=transport,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, path: str, form: Mapping[str, str] | None = None, body: Any = None) -> bytes:
        return await self._call("POST", path, data=form, json=body)

    async def get(self, path: str, params: Mapping[str, str]) -> bytes:
        return await self._call("GET", path, params=params)

    async def _call(self, method: str, path: str, **content: Any) -> bytes:
        raw = bytearray()
        try:
            async with (
                asyncio.timeout(_ANSWERS_WITHIN),
                self._http.stream(method, path, headers=self._with_token(), **content) as answer,
            ):
                if answer.headers.get("content-encoding", "identity").lower() != "identity":
                    raise LogsUnavailable("the log store compresses its answer, which was not asked for")
                async for piece in answer.aiter_bytes():
                    raw += piece
                    if len(raw) > _MOST_BYTES:
                        raise LogsUnavailable("the log store answers more than 64 MiB to one query")
        except TimeoutError as error:
            raise LogsUnavailable(f"the log store does not answer within {_ANSWERS_WITHIN:g} s") from error
        except httpx.HTTPError as error:
            raise LogsUnavailable(f"the log store does not answer ({type(error).__name__})") from error
        if answer.is_success:
            return bytes(raw)
        reason = raw.decode(errors="replace").strip()[:LONGEST_REASON]
        if answer.status_code in (400, 422):
            raise LogQueryRefused(f"the log store refuses the query: {reason}")
        raise LogsUnavailable(f"the log store answers {answer.status_code}: {reason}")

    def _with_token(self) -> dict[str, str]:
        if self._token_file is None:
            return self._headers
        try:
            token = self._token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LogsUnavailable(unreadable_file(_BEARER_OPTION, self._token_file, error)) from error
        if not token.isascii() or not token.isprintable():
            raise LogsUnavailable(f"{_BEARER_OPTION}: {self._token_file} is not one line of printable ASCII")
        return {**self._headers, "Authorization": f"Bearer {token}"}


def read_json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except UNREADABLE as error:
        raise LogsUnavailable("the log store does not answer with JSON") from error
