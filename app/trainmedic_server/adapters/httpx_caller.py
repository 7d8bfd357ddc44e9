"""HTTP calls by httpx; implements `ports.outside.HttpCaller`. Secrets are looked up here, so that no action and no
history contains them. ``NAME_FILE`` is the path of a file with the secret ``NAME``, read for each call.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from trainmedic_server import __version__
from trainmedic_server.adapters.foreign_answers import no_cookies
from trainmedic_server.errors import ConfigurationError, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.outside import HttpReply

BODY_LIMIT = 64 * 1024


class HttpxCaller:
    """HTTP client with a new connection for each call: if the peer closed a reused one, the call would seem lost."""

    def __init__(
        self,
        secrets: Mapping[str, str] | None = None,
        body_limit: int = BODY_LIMIT,
        socket: str | None = None,
        ca_file: Path | None = None,
    ) -> None:
        """With `socket`, all calls go to this UNIX socket. With `ca_file`, only its certificates are trusted. Raises
        ConfigurationError if it has none.
        """
        self._secrets = dict(secrets or {})
        self._body_limit = body_limit
        self._socket = socket
        self._trusted = _trusting(ca_file) if ca_file is not None else None
        self._client: httpx.AsyncClient | None = None

    async def call(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: timedelta,
        bearer: str | None = None,
    ) -> HttpReply:
        secret = None if bearer is None else await self._secret(bearer)
        peer = f"{method} {_host(url)}"
        sending = _headers(headers, secret)
        until = asyncio.get_running_loop().time() + timeout.total_seconds()
        sent = False

        async def trace(event: str, _: Mapping[str, object]) -> None:
            nonlocal sent
            sent = sent or event.endswith("send_request_headers.started")

        try:
            request = self._opened().build_request(
                method,
                url,
                headers=sending,
                content=body,
                timeout=timeout.total_seconds(),
                extensions={"trace": trace},
            )
            async with asyncio.timeout_at(until):
                response = await self._opened().send(request, stream=True)
            try:
                content = await _read(response, self._body_limit, until)
            finally:
                await response.aclose()
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise PermanentFailure(f"{peer}: the call cannot be made: {type(error).__name__}") from error
        except TimeoutError as error:
            raise _lost(sent, f"{peer}: no answer within {timeout.total_seconds():g}s") from error
        except httpx.HTTPError as error:
            raise _lost(sent, f"{peer}: {type(error).__name__}: {error}") from error
        return _reply(response, content, secret)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _opened(self) -> httpx.AsyncClient:
        # Created on first use: reading the certificates takes 50 ms.
        if self._client is None:
            limits = httpx.Limits(max_keepalive_connections=0)
            verify = self._trusted or True
            transport = (
                httpx.AsyncHTTPTransport(verify=verify, limits=limits, uds=self._socket) if self._socket else None
            )
            self._client = httpx.AsyncClient(
                follow_redirects=False, cookies=no_cookies(), limits=limits, verify=verify, transport=transport
            )
        return self._client

    async def _secret(self, name: str) -> str:
        if name in self._secrets:
            secret = self._secrets[name].strip()
        elif f"{name}_FILE" in self._secrets:
            secret = await read_secret(Path(self._secrets[f"{name}_FILE"]), name)
        else:
            raise PermanentFailure(f"the server has no secret {name}; set that variable or {name}_FILE")
        if not secret or not secret.isascii() or not secret.isprintable():
            raise PermanentFailure(f"the secret {name} is empty, or not one line of printable ASCII")
        return secret


def _trusting(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is one
        raise ConfigurationError(f"cannot read the certificates to trust in {ca_file}: {error}") from error


async def read_secret(path: Path, name: str) -> str:
    """Raises TemporaryFailure: the file may return."""
    try:
        return (await asyncio.to_thread(path.read_text)).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TemporaryFailure(f"the file of {name} cannot be read: {type(error).__name__}") from error


def _headers(headers: Mapping[str, str], secret: str | None) -> list[tuple[bytes, bytes]]:
    own = {"User-Agent": f"trainmedic/{__version__}", "Accept-Encoding": "identity"}
    if secret is not None:
        own["Authorization"] = f"Bearer {secret}"
    replaced = {name.lower() for name in own} - {"user-agent"}
    named = {name.lower() for name in headers}
    sending = [(name, value) for name, value in own.items() if name.lower() in replaced or name.lower() not in named]
    sending += [(name, value) for name, value in headers.items() if name.lower() not in replaced]
    return [(name.encode(), value.encode()) for name, value in sending]


async def _read(response: httpx.Response, limit: int, until: float) -> bytes:
    content = bytearray()
    try:
        async with asyncio.timeout_at(until):
            async for chunk in response.aiter_raw():
                content += chunk[: limit - len(content)]
                if len(content) >= limit:
                    break
    except (TimeoutError, httpx.TransportError):
        pass
    return bytes(content)


def _reply(response: httpx.Response, content: bytes, secret: str | None) -> HttpReply:
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        content = b""  # compressed without a request; unreadable if truncated
    headers = {name.lower(): value for name, value in response.headers.items()}
    text = _decoded(content, response.charset_encoding or "utf-8")
    if secret is not None:
        text = text.replace(secret, "***")
        headers = {name: value.replace(secret, "***") for name, value in headers.items()}
    return HttpReply(response.status_code, headers, text)


def _decoded(content: bytes, charset: str) -> str:
    """Decode a body. Use UTF-8 for a charset that is unknown, not one of text (``rot13``), or that cannot replace
    invalid bytes (``idna``).
    """
    try:
        return content.decode(charset, errors="replace")
    except (LookupError, ValueError):
        return content.decode(errors="replace")


def _lost(sent: bool, reason: str) -> TemporaryFailure | OutcomeUnknown:
    return OutcomeUnknown(f"{reason}; the call may have been carried out") if sent else TemporaryFailure(reason)


def _host(url: str) -> str:
    """Return scheme and host for error texts; the rest of a URL may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
