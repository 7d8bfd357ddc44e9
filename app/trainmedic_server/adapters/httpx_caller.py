"""HTTP calls by httpx. Secrets are looked up here, so that no action and no history contains them."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx
from msgspec.structs import replace

from trainmedic.errors import described
from trainmedic_core.setting_sources import unreadable_file
from trainmedic_server import __version__
from trainmedic_server.adapters.foreign_answers import no_cookies
from trainmedic_server.errors import ConfigurationError, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.outside import NO_ACCESS, HttpAccess, HttpReply

BODY_LIMIT = 64 * 1024  # bytes of a reply; a longer one is cut


class HttpxCaller:
    """Opens a connection for each call: on a reused one that the peer has closed, the outcome would be unknown.

    `secrets`: variables with a secret, or ``…_FILE`` with its path.
    """

    def __init__(
        self,
        secrets: Mapping[str, str] | None = None,
        body_limit: int = BODY_LIMIT,
        socket: str | None = None,
        ca_file: Path | None = None,
    ) -> None:
        """With `ca_file`, only its certificates are trusted. Raises ConfigurationError if it has none."""
        self._secrets = dict(secrets or {})
        self._body_limit = body_limit
        self._socket = socket
        self._ca_file = ca_file
        self._trusted = _ssl_context_of(ca_file) if ca_file is not None else None
        self._client: httpx.AsyncClient | None = None

    async def call(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: timedelta,
        bearer: str | None = None,
        access: HttpAccess = NO_ACCESS,
    ) -> HttpReply:
        secrets = await self._secret_headers(bearer, access)
        peer = f"{method} {_host(url)}"
        sending = _headers(headers, {name: text for name, (text, _) in secrets.items()})
        client = await self._client_for(access)
        try:
            limit = access.largest_reply or self._body_limit
            reply, is_cut = await self._send(client, peer, (method, url), sending, body, timeout, limit)
        finally:
            if client is not self._client:
                await client.aclose()
        return _redacted(reply, [part for _, parts in secrets.values() for part in parts], is_cut)

    async def _send(
        self,
        client: httpx.AsyncClient,
        peer: str,
        method_and_url: tuple[str, str],
        headers: list[tuple[bytes, bytes]],
        body: bytes | None,
        timeout: timedelta,
        limit: int,
    ) -> tuple[HttpReply, bool]:
        until = asyncio.get_running_loop().time() + timeout.total_seconds()
        sent = False

        async def trace(event: str, _: Mapping[str, object]) -> None:
            nonlocal sent  # The transport reports each step of the call here.
            sent = sent or event.endswith("send_request_headers.started")

        try:
            request = client.build_request(
                *method_and_url,
                headers=headers,
                content=body,
                timeout=timeout.total_seconds(),
                extensions={"trace": trace},
            )
            async with asyncio.timeout_at(until):
                response = await client.send(request, stream=True)
            try:
                content, is_cut = await _read(response, limit, until)
            finally:
                await response.aclose()
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise PermanentFailure(f"{peer}: the call cannot be made: {type(error).__name__}") from error
        except TimeoutError as error:
            raise _no_reply_error(sent, f"{peer}: no answer within {timeout.total_seconds():g}s") from error
        except httpx.HTTPError as error:
            raise _no_reply_error(sent, f"{peer}: the connection failed: {described(error)}") from error
        return _reply(response, content), is_cut

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _client_for(self, access: HttpAccess) -> httpx.AsyncClient:
        if access.certificate is None and access.ca is None and access.socket is None:
            # Created on first use: reading the certificates takes 50 ms.
            self._client = self._client or _new_client(self._trusted, self._socket)
            return self._client
        socket = self._path(access.socket) if access.socket is not None else self._socket
        return _new_client(await self._context(access), str(socket) if socket is not None else None)

    async def _context(self, access: HttpAccess) -> ssl.SSLContext | None:
        if access.certificate is None and access.ca is None:
            return self._trusted
        ca = self._path(access.ca) if access.ca is not None else self._ca_file
        certificate = self._path(access.certificate) if access.certificate is not None else None

        def read() -> ssl.SSLContext:
            context = ssl.create_default_context(cafile=ca)
            if certificate is not None:
                context.load_cert_chain(certificate, password="")  # OpenSSL would ask the terminal for one
            return context

        try:
            return await asyncio.to_thread(read)
        except OSError as error:  # SSLError is one
            names = " or ".join(filter(None, (access.ca, access.certificate)))
            key = " and their key without a password" if access.certificate is not None else ""
            raise TemporaryFailure(
                f"{names}: the file cannot be used: {error.strerror or type(error).__name__}; name a file with PEM "
                f"certificates{key} that the server can read"
            ) from error

    def _path(self, name: str) -> Path:
        path = self._secrets.get(name) or self._secrets.get(f"{name}_FILE")
        if not path:
            raise PermanentFailure(f"the server has no {name}; set that variable or {name}_FILE to a path")
        return Path(path.strip())

    async def _secret_headers(self, bearer: str | None, access: HttpAccess) -> dict[str, tuple[str, Sequence[str]]]:
        """Return by header its value, and the texts to redact in the reply."""
        found: dict[str, tuple[str, Sequence[str]]] = {}  # A later value of Authorization replaces an earlier one.
        if bearer is not None:
            token = await self._secret(bearer)
            found["Authorization"] = f"Bearer {token}", [token]
        if access.user is not None and access.password is not None:
            password = await self._secret(access.password)
            encoded = base64.b64encode(f"{access.user}:{password}".encode()).decode()
            found["Authorization"] = f"Basic {encoded}", [encoded, password]
        for header, name in access.headers.items():
            value = await self._secret(name)
            found[header] = value, [value]
        return found

    async def _secret(self, name: str) -> str:
        if name in self._secrets:
            secret = self._secrets[name].strip()
        elif f"{name}_FILE" in self._secrets:
            secret = await read_secret(Path(self._secrets[f"{name}_FILE"]), f"{name}_FILE")
        else:
            raise PermanentFailure(f"the server has no secret {name}; set that variable or {name}_FILE")
        if not secret or not secret.isascii() or not secret.isprintable():
            raise PermanentFailure(f"the secret {name} is empty, or not one line of printable ASCII")
        return secret


class Endpoint:
    """A service. The URL's user and password are sent as Basic, the token file's content as Bearer."""

    def __init__(self, url: str, token_file: Path | None, setting: str, body_limit: int = BODY_LIMIT) -> None:
        """For errors, `setting` names the token file."""
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        self._url = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        self._base = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self._basic = base64.b64encode(unquote(user).encode()).decode() if user else None
        self._token_file = token_file
        self._setting = setting
        self._http = HttpxCaller(body_limit=body_limit)

    async def authorization(self) -> dict[str, str]:
        """Return the header. Raises TemporaryFailure if the token cannot be read."""
        if self._token_file is not None:
            return {"Authorization": f"Bearer {await read_secret(self._token_file, self._setting)}"}
        return {"Authorization": f"Basic {self._basic}"} if self._basic is not None else {}

    async def call(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, timeout: timedelta
    ) -> HttpReply:
        """Append `path` to the URL, in place of its query."""
        return await self._http.call(method, f"{self._base}{path}" if path else self._url, headers, body, timeout)

    async def close(self) -> None:
        await self._http.close()


def _new_client(trusted: ssl.SSLContext | None, socket: str | None) -> httpx.AsyncClient:
    limits = httpx.Limits(max_keepalive_connections=0)
    verify = trusted or True
    transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, uds=socket) if socket else None
    return httpx.AsyncClient(
        follow_redirects=False, cookies=no_cookies(), limits=limits, verify=verify, transport=transport
    )


def _ssl_context_of(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is one
        raise ConfigurationError(
            f"cannot read the certificates to trust in {ca_file}: {error.strerror or error}; name a "
            "file with PEM certificates that the server can read"
        ) from error


async def read_secret(path: Path, setting: str) -> str:
    """Read the file that `setting` names. Raises TemporaryFailure: the file may return."""
    try:
        return (await asyncio.to_thread(path.read_text, encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TemporaryFailure(unreadable_file(setting, path, error)) from error


def _headers(headers: Mapping[str, str], secrets: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    # Secrets replace headers of their names; only the user agent can be overridden.
    own = {"User-Agent": f"trainmedic/{__version__}", "Accept-Encoding": "identity", **secrets}
    replaced = {name.lower() for name in own} - {"user-agent"}
    named = {name.lower() for name in headers}
    sending = [(name, value) for name, value in own.items() if name.lower() in replaced or name.lower() not in named]
    sending += [(name, value) for name, value in headers.items() if name.lower() not in replaced]
    return [(name.encode(), value.encode()) for name, value in sending]


async def _read(response: httpx.Response, limit: int, until: float) -> tuple[bytes, bool]:
    content = bytearray()  # returned with whether it may be cut
    try:
        async with asyncio.timeout_at(until):
            async for chunk in response.aiter_raw():
                content += chunk[: limit - len(content)]
                if len(content) >= limit:
                    return bytes(content), True
    except (TimeoutError, httpx.TransportError):  # The status has arrived.
        return bytes(content), True
    return bytes(content), False


def _reply(response: httpx.Response, content: bytes) -> HttpReply:
    is_compressed = response.headers.get("content-encoding", "identity").lower() != "identity"
    if is_compressed:
        # Nobody asked for compression. Such a reply counts as cut, because its text is not known.
        content = b""
    headers = {name.lower(): value for name, value in response.headers.items()}
    text = _decoded(content, response.charset_encoding or "utf-8")
    return HttpReply(response.status_code, headers, text, is_cut=is_compressed)


def _redacted(reply: HttpReply, secrets: Sequence[str], is_cut: bool) -> HttpReply:
    for secret in sorted(secrets, key=len, reverse=True):
        headers = {name: value.replace(secret, "***") for name, value in reply.headers.items()}
        reply = replace(reply, headers=headers, body=reply.body.replace(secret, "***"))
    if not is_cut:
        return reply
    reply = replace(reply, is_cut=True)
    # The cut may lie within a secret, whose beginning is then at the end of the body.
    body = reply.body.rstrip("\ufffd")  # half of a character
    begun = max((_begun_length(body, secret) for secret in secrets), default=0)
    return replace(reply, body=f"{body[:-begun]}***") if begun else reply


def _begun_length(body: str, secret: str) -> int:
    return next((length for length in range(len(secret) - 1, 0, -1) if body.endswith(secret[:length])), 0)


def _decoded(content: bytes, charset: str) -> str:
    """Use UTF-8 for charsets that are unknown, not of text (``rot13``), or cannot replace invalid bytes (``idna``)."""
    try:
        return content.decode(charset, errors="replace")
    except (LookupError, ValueError):
        return content.decode(errors="replace")


def _no_reply_error(sent: bool, reason: str) -> TemporaryFailure | OutcomeUnknown:
    return OutcomeUnknown(f"{reason}; the call may have been carried out") if sent else TemporaryFailure(reason)


def _host(url: str) -> str:
    """Return scheme and host: the rest of a URL may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
