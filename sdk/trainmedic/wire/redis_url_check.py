"""Syntax check of Redis URLs: redis-py silently ignores parts that it cannot read."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from trainmedic.wire.host_port import is_host, is_port

SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")
_PARTS = re.compile(r"(?P<scheme>[a-z+]+)://(?P<place>[^/?#]*)(?P<path>[^?#]*)(?P<options>\?[^#]*)?", re.DOTALL)
_PLACE = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?P<port>:.*)?", re.DOTALL)
_MASTER = re.compile(r"[A-Za-z0-9._-]+")  # Sentinel's own rule
_ESCAPES = "; write special characters in a user or password as %XX"


def check_redis_url(url: str) -> None:
    """Raise ValueError without showing any part of `url`, which may hold a password."""
    if not url.startswith(SCHEMES):
        raise ValueError(f"must be a URL that begins with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}")
    if re.search(r"[\x00-\x1f\x7f]", url):
        raise ValueError("must be a URL without control characters")
    parts = _PARTS.fullmatch(url)
    if parts is None:
        raise ValueError(f"must be a URL without a #{_ESCAPES}")
    places, path = parts["place"].rpartition("@")[2], unquote(parts["path"])
    if parts["scheme"] == "unix":
        _check_socket(places, path)
    elif parts["scheme"] in ("redis", "rediss"):
        _check_place(places, "Redis", is_needed=False)
        _check_database(path)
    else:
        for place in places.split(","):
            _check_place(place, "each Sentinel", is_needed=True)
        _check_master(path)
    if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in re.findall(r"[?&]db=([^&]*)", parts["options"] or "")):
        raise ValueError("must have the number of a database, from 0, as its option db")
    try:
        urlsplit(url)
    except ValueError:
        raise ValueError(f"must be a valid URL{_ESCAPES}") from None


def _check_socket(place: str, path: str) -> None:
    if place:
        raise ValueError("must name the socket with three slashes, unix:///path/to/redis.sock: a socket has no host")
    if not path.strip("/"):
        raise ValueError("must name the socket: unix:///path/to/redis.sock")


def _check_place(place: str, whose: str, is_needed: bool) -> None:
    parts = _PLACE.fullmatch(place)
    host = parts["host"].strip("[]") if parts is not None else ""
    if is_needed and not host:
        raise ValueError(f"must name the host of {whose}: redis+sentinel://host:26379,host:26379/master{_ESCAPES}")
    if parts is None or (host and not is_host(host)):
        raise ValueError(f"must have a name or an address as the host of {whose}, with [] around IPv6{_ESCAPES}")
    if parts["port"] not in (None, ":") and not is_port(parts["port"][1:]):
        raise ValueError(f"must have a port from 1 to 65535, or none, for {whose}{_ESCAPES}")


def _check_database(path: str) -> None:
    if not re.fullmatch(r"(/[0-9]{0,9})?/?", path):
        raise ValueError("must have the number of a database, from 0, after the host and nothing else: host:6379/0")


def _check_master(path: str) -> None:
    master, _, database = path[1:].partition("/")
    if not master:
        raise ValueError("must have the master's name after the Sentinels: redis+sentinel://host:26379/master/0")
    if not _MASTER.fullmatch(master):
        raise ValueError("must have a master's name of letters, digits, dots, dashes and underscores")
    if not re.fullmatch(r"[0-9]{0,9}/?", database):
        raise ValueError("must have the number of a database, from 0, after the master's name and nothing else")
