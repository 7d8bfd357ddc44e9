"""Parser of URLs of a Redis with Sentinels: ``redis+sentinel://user:password@host:26379,host:26379/master-name/0``.

User, password and options are the master's, except ``sentinel_username`` and ``sentinel_password``.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from redis.connection import parse_url

_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_PORT = 26379
_OF_SENTINELS = ("sentinel_username", "sentinel_password")


class BehindSentinels(NamedTuple):
    sentinels: tuple[tuple[str, int], ...]
    master: str
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def behind_sentinels(url: str) -> BehindSentinels | None:
    """Parse a checked URL; None without Sentinels. Raises ValueError for its options."""
    parts = urlsplit(url)
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None:
        return None
    user, _, places = parts.netloc.rpartition("@")
    master, _, database = parts.path.strip("/").partition("/")
    sentinels = tuple(_place(text) for text in places.split(","))
    at = f"{user}@" if user else ""
    query = f"?{parts.query}" if parts.query else ""
    plain = f"{scheme}://{at}localhost/{database}{query}"  # a URL that redis-py parses; its host is dropped
    options: dict[str, Any] = dict(parse_url(plain))  # type: ignore[no-untyped-call]
    options.pop("host", None)
    is_tls = options.pop("connection_class", None) is not None
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")} | {"ssl": True} if is_tls else {}
    asked = {name: options.pop(name) for name in _OF_SENTINELS if name in options}
    of_sentinels = {name.replace("sentinel_", ""): value for name, value in asked.items()}
    return BehindSentinels(sentinels, unquote(master), options | tls, of_sentinels | tls)


def _place(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    return parts.hostname or "", parts.port or _PORT
