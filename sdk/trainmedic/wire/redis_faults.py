"""Explanations of Redis's refusals, without parts of a URL or of a command."""

from __future__ import annotations

import re
import socket
import ssl
from typing import Iterator

from redis import exceptions

_COMMAND = re.compile(r"run the '([a-z|._-]{1,40})' command")
# OpenSSL's verify codes.
_EXPIRED, _NOT_YET_VALID = 10, 9
_UNTRUSTED = frozenset({2, 18, 19, 20, 21})
_OTHER_NAME = frozenset({62, 64})
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
_CLIENT_CERTIFICATE = "name one with ?ssl_certfile=/path/to/crt.pem&ssl_keyfile=/path/to/key.pem"
_CLOSED = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
_MOST_CAUSES = 8  # exceptions of a chain that are examined, as it may be circular


def explained(error: BaseException, url: str | None = None) -> str:
    """Return the refusal or TLS failure with its remedy, as half a sentence, or ""."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, exceptions.NoPermissionError):
            return _not_permitted(str(cause))
        if isinstance(cause, exceptions.AuthenticationError):
            return _not_authenticated(str(cause))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _certificate(cause)
    for cause in causes:
        if isinstance(cause, ssl.SSLError):
            return _tls(cause)
    return _connection(causes, url)


def unreachable(error: BaseException) -> str:
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return "the host name of the URL cannot be resolved"
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens at the host and port of the URL (connection refused)"
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MOST_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _not_authenticated(words: str) -> str:
    if "Authentication required" in words:
        return "Redis asks for a password, and the URL has none; write redis://user:password@host"
    if "without any password configured" in words:
        return "the URL has a password, and this Redis has none for its default user; remove it, or name a user"
    return (
        "Redis does not accept the user and password of the URL; check both, and write special characters in them as "
        "%XX, such as %40 for @"
    )


def _not_permitted(words: str) -> str:
    command = _COMMAND.search(words)
    if command is not None:
        name = command[1]
        return (
            f"Redis does not permit its user the command {name.replace('|', ' ').upper()}; grant it with "
            f"ACL SETUSER <user> +{name}"
        )
    if "key" in words:
        return (
            "Redis does not permit its user a key that is needed; grant its keys, which of the server are all of "
            "Trainmedic's: ACL SETUSER <user> ~trainmedic:*"
        )
    return "Redis does not permit its user a command or a key; ACL LOG in Redis says which"


def _certificate(error: ssl.SSLCertVerificationError) -> str:
    code = error.verify_code
    if code == _EXPIRED:
        return "TLS failed: Redis's certificate has expired; renew it"
    if code == _NOT_YET_VALID:
        return "TLS failed: Redis's certificate is not valid yet; compare the clocks of both machines"
    if code in _OTHER_NAME:
        return "TLS failed: Redis's certificate is for another name than the host of the URL; use a name that it has"
    if code in _UNTRUSTED:
        return (
            "TLS failed: Redis's certificate is not signed by an authority that is trusted here; name its CA with "
            "?ssl_ca_certs=/path/to/ca.crt"
        )
    return f"TLS failed: Redis's certificate is not accepted (OpenSSL's code {code})"


def _tls(error: ssl.SSLError) -> str:
    reason = str(error.reason or "")
    if any(word in reason for word in _NO_TLS):
        return "TLS failed: this port of Redis speaks no TLS; write redis:// instead of rediss://"
    if "CERTIFICATE_REQUIRED" in reason:
        return f"TLS failed: Redis asks for a client certificate; {_CLIENT_CERTIFICATE}"
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return f"TLS failed: Redis does not accept the client certificate ({reason})"
    if isinstance(error, ssl.SSLEOFError):
        return f"TLS failed: Redis ended the connection; if it asks for a client certificate, {_CLIENT_CERTIFICATE}"
    return f"TLS failed ({reason or type(error).__name__})"


def _connection(causes: list[BaseException], url: str | None) -> str:
    is_tls = url is not None and url.startswith("rediss")
    is_plain = url is not None and not is_tls and not url.startswith("unix")
    for cause in causes:
        if is_tls and isinstance(cause, (FileNotFoundError, PermissionError)):
            return "TLS failed: a file that the URL names for it is missing or cannot be read"
    if any("handshake" in str(cause) and "timed out" in str(cause) for cause in causes):
        return (
            "TLS failed: the handshake had no answer; if this port speaks no TLS, write redis:// instead of rediss://"
        )
    if is_tls and "connecting" in str(causes[0]) and isinstance(causes[0], exceptions.TimeoutError):
        return (
            "connecting with TLS timed out: the host does not answer, or this port speaks no TLS, for which the URL "
            "begins with redis:// instead of rediss://"
        )
    is_closed = any(isinstance(cause, _CLOSED) for cause in causes) or "closed" in str(causes[0])
    if is_plain and is_closed and isinstance(causes[0], exceptions.ConnectionError):
        return "Redis closed the connection; if this port speaks TLS, write rediss:// instead of redis://"
    return ""
