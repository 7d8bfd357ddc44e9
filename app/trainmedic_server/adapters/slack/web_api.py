"""Slack's Web API. Neither tokens nor URLs with tickets are in any error or log line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.errors import ChatRefused, OutcomeUnknown, TemporaryFailure

_TIMEOUT = timedelta(seconds=10)
_LONGEST_WAIT_SECONDS = 30.0  # A longer Retry-After is not awaited.
_TEMPORARY_ERRORS = frozenset(
    {"ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable", "request_timeout",
     "team_added_to_org", "accesslimited"}
)  # fmt: skip
_APP_ERRORS = frozenset(
    {"invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired",
     "not_allowed_token_type", "org_login_required", "ekm_access_denied", "app_uninstalled"}
)  # fmt: skip
"""Errors of the app or its token: every call fails until people fix it."""


class SlackApi:
    def __init__(self, url: str, bot_token: str, app_token: str) -> None:
        self._url = url.rstrip("/")
        self._bot_token = bot_token
        self._app_token = app_token
        self._http = HttpxCaller()

    async def open_socket(self) -> str:
        answer = await self.call("apps.connections.open", {}, self._app_token)
        address = str(answer.get("url", ""))
        # Unencrypted only if the API is too, which settings allow only on the loopback interface.
        if not address.startswith(("wss://", *(["ws://"] if self._url.startswith("http:") else []))):
            raise TemporaryFailure("Slack gave no wss:// address for the socket")
        return address

    async def call(self, method: str, document: Mapping[str, Any], token: str | None = None) -> dict[str, Any]:
        """Raises ChatRefused if this call is invalid, TemporaryFailure if every call fails, OutcomeUnknown."""
        headers = {
            "Content-Type": "application/json; charset=utf-8",
            "Authorization": f"Bearer {token or self._bot_token}",
        }
        body = json.dumps(document).encode()
        for is_last in (False, True):
            reply = await self._http.call("POST", f"{self._url}/{method}", headers, body, _TIMEOUT)
            wait = _retry_after(reply.headers)
            if reply.status != 429 or is_last or wait > _LONGEST_WAIT_SECONDS:
                break
            await asyncio.sleep(wait)
        if reply.status != 200:
            failure = OutcomeUnknown if reply.status >= 500 else TemporaryFailure
            raise failure(f"Slack answers {method} with status {reply.status}")
        try:
            answer: dict[str, Any] = json.loads(reply.body)
            succeeded = answer.get("ok") is True
        except UNREADABLE:
            raise OutcomeUnknown(f"Slack does not answer {method} with a JSON object") from None
        if succeeded:
            return answer
        code = str(answer.get("error", "no reason"))[:100]
        if code in _TEMPORARY_ERRORS | _APP_ERRORS:
            raise TemporaryFailure(f"Slack refuses {method}: {code}")
        raise ChatRefused(f"Slack refuses {method}: {code}", code)

    async def close(self) -> None:
        await self._http.close()


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return max(1.0, float(headers.get("retry-after", "1")))
    except ValueError:
        return 1.0
