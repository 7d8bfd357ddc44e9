from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from trainmedic.wire.host_port import is_host

ESCAPES = "in a user or password @ is written %40, / %2F, ? %3F, # %23, : %3A and % %25"
_AUTHORITY = re.compile(r"[A-Za-z]+://([^/?#]*)(.*)", re.DOTALL)
_HOST_IN_REST = re.compile(r"[/?#][^/@=]+@([^/:?#]+)")
_NOT_IN_A_URL = re.compile(r"[\x00-\x20\x7f\\]")


def check_http_url(url: str) -> SplitResult:
    """Return the parts of a URL. Raises ValueError without the URL, which may contain a password."""
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError("must be a URL that begins with http:// or https://")
    _check_user_and_password(url)
    if _NOT_IN_A_URL.search(url):
        raise ValueError("must be a URL without spaces, control characters and backslashes")
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:  # its text would repeat the user and password
        parts, host = None, "["
    if not host:
        raise ValueError("must name a host, as http://host:8080 does")
    if parts is None or not is_host(host):
        raise ValueError("must be a URL of one host: a name, or an address such as 10.1.2.3 or [2001:db8::1]")
    try:
        is_port = parts.port is None or parts.port > 0
    except ValueError:
        is_port = False
    if not is_port:
        raise ValueError("must have a port from 1 to 65535, or none")
    return parts


def without_user(url: str) -> str:
    before, at, host = url.rpartition("@")
    scheme = f"{before.partition('://')[0]}://" if "://" in before else ""
    return f"{scheme}{host}" if at else url


def _check_user_and_password(url: str) -> None:
    """Raise ValueError for unescaped characters that would shift the host."""
    match = _AUTHORITY.fullmatch(url)
    if match is None:
        return
    authority, rest = match[1], match[2]
    if authority.count("@") > 1:
        raise ValueError(f"must have one @ before the host: {ESCAPES}")
    if "@" in authority or ":" not in authority or authority.startswith("[") or "@" not in rest:
        return
    # An unescaped / ? or # in a password ends the authority early, and the @ comes after it.
    behind = _HOST_IN_REST.match(rest)
    has_port = authority.rpartition(":")[2].isdigit()
    if not has_port or (behind is not None and is_host(behind[1])):
        raise ValueError(f"must have its user and password escaped: {ESCAPES}")
