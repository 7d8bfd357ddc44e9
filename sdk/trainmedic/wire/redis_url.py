"""What the URL of a Redis behind Sentinels says: redis-py reads every other kind itself.

``redis+sentinel://user:password@sentinel-1:26379,sentinel-2:26379/master-name/0`` names Sentinels, which say where
the master is; user, password, database and the options behind ``?`` are the master's. ``rediss+sentinel://`` is TLS, to
the Sentinels too. ``sentinel_username`` and ``sentinel_password`` are for Sentinels that ask for them. Who calls it:
``connection`` and the server's ``redis_connection``. It connects to nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from redis.connection import parse_url

_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_PORT = 26379
_OF_SENTINELS = ("sentinel_username", "sentinel_password")


class BehindSentinels(NamedTuple):
    """A master that Sentinels know."""

    sentinels: tuple[tuple[str, int], ...]
    """Hosts and ports."""
    master: str
    options: dict[str, Any]
    """Of the connection to the master, as redis-py takes them; ``ssl`` for TLS."""
    sentinel_options: dict[str, Any]


def behind_sentinels(url: str) -> BehindSentinels | None:
    """What `url`, which was checked, says; None where it names a Redis itself. Raises ValueError for its options."""
    parts = urlsplit(url)
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None:
        return None
    user, _, places = parts.netloc.rpartition("@")
    master, _, database = parts.path.strip("/").partition("/")
    sentinels = tuple(_place(text) for text in places.split(","))
    at = f"{user}@" if user else ""
    query = f"?{parts.query}" if parts.query else ""
    plain = f"{scheme}://{at}localhost/{database}{query}"
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
