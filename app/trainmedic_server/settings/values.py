"""Base and types of the server's settings.

The types raise ValueError, which `server.load` turns into a message with the flag or variable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, SecretStr

from trainmedic.wire.connection import open_client
from trainmedic_core.fields import Duration
from trainmedic_core.http_url import ESCAPES, check_http_url
from trainmedic_core.setting_sources import expanded
from trainmedic_server.domain.message import parse_rules
from trainmedic_server.domain.message_routes import parse_routes
from trainmedic_server.domain.playbook import Mode


class SettingGroup(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


_NO_PATH = "must name a file or directory; write . for the working directory"


def _not_empty(value: Any) -> Any:
    if value == "":
        raise ValueError(_NO_PATH)
    return value


def _at_least_one(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    if not paths:
        raise ValueError(_NO_PATH)
    return paths


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("must be longer than 0s")
    return value


def _takeover(value: timedelta) -> timedelta:
    if not timedelta(seconds=3) <= value <= timedelta(hours=1):
        raise ValueError("must be from 3s to 1h")
    return value


def _redis_url(url: SecretStr) -> SecretStr:
    # Raises ValueError. No connection is made.
    open_client(url.get_secret_value()).close()
    return url


def _http_url(url: SecretStr) -> SecretStr:
    check_http_url(url.get_secret_value())
    return url


def _store_url(url: SecretStr) -> SecretStr:
    kind, plus, http_url = url.get_secret_value().partition("+")
    if kind not in LINE_STORES or not plus or not http_url.startswith(("http://", "https://")):
        beginnings = (f"{kind}+{scheme}://" for kind in LINE_STORES for scheme in ("http", "https"))
        raise ValueError("must be a URL that begins with " + " or ".join(beginnings))
    check_http_url(http_url)
    return url


def _database(url: SecretStr) -> SecretStr:
    if "://" not in url.get_secret_value():
        raise ValueError("must be a URL such as sqlite:////var/lib/trainmedic/trainmedic.db")
    scheme, _, rest = url.get_secret_value().partition("://")
    if not scheme.startswith("sqlite"):
        _check_database_user(rest)
    return url


def _check_database_user(rest: str) -> None:
    """Raise ValueError if a database driver would read a part of the password as host or database."""
    authority, slash, path = rest.partition("/")
    user, _, more = authority.partition("@")
    host, _, options = more.partition("?")
    # The first check finds passwords such as a@b and a@b?c, the second such as a/b.
    is_cut = "@" in host or "@" in options.partition("=")[0]
    if is_cut or (":" in user and slash and "@" in path.partition("?")[0]):
        raise ValueError(f"must have one @, before the host: {ESCAPES}")


def _signing_key(key: SecretStr) -> SecretStr:
    if not key.get_secret_value().encode().strip():
        raise ValueError("must not be blank: an empty key protects nothing")
    return key


def _host_and_port(value: str) -> str:
    host, colon, port = value.rpartition(":")
    is_port = re.fullmatch(r"\d{1,5}", port, re.ASCII) and 0 < int(port) <= 65535
    if not (colon and is_port and re.fullmatch(r"[\w.-]+|\[?[0-9A-Fa-f:.]+\]?", host)):
        raise ValueError("must be an address and a port, such as 10.1.2.3:8080 or [2001:db8::1]:8080")
    return f"[{host.strip('[]')}]:{port}" if ":" in host else value


def _host_name(value: str) -> str:
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", value):
        raise ValueError("must be a host's name without a port, such as trainmedic.example.org or *.example.org")
    return value.lower()


def _channels(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    channels: dict[str, tuple[str, ...]] = {}
    for number, pair in enumerate(value.split(), 1):
        name, equals, url = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) or "://" not in url:
            raise ValueError(f"pair {number} is not name=url, such as oncall=slack://TokenA/TokenB/TokenC")
        channels[name] = (*channels.get(name, ()), url)
    return channels


def _external_url(value: str) -> str:
    if not value:
        return value
    try:
        parts = check_http_url(value)
    except ValueError:
        parts = None
    if parts is None or not value.isascii() or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(
            "must be an http:// or https:// URL without user, query and fragment, such as https://trainmedic.example.org"
        )
    return value.rstrip("/")


def _page_url(value: str) -> str:
    if value and check_http_url(value).fragment:
        raise ValueError("must be the URL of a page, without a # and a section")
    return value


LINE_STORES = ("loki", "victorialogs", "opensearch")
LogFormat = Literal["auto", "json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]
AnyCaseLogLevel = Annotated[LogLevel, BeforeValidator(_lower)]
AnyCaseMode = Annotated[Mode, BeforeValidator(_lower)]
ExpandedPath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(expanded)]
# `Field(min_length=1)` would also report a list whose only path is invalid as empty.
ExpandedPaths = Annotated[tuple[ExpandedPath, ...], AfterValidator(_at_least_one)]
PositiveDuration = Annotated[Duration, AfterValidator(_positive)]
TakeoverDuration = Annotated[Duration, AfterValidator(_takeover)]
SigningKey = Annotated[SecretStr, AfterValidator(_signing_key)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis_url)]
HttpUrl = Annotated[SecretStr, AfterValidator(_http_url)]
StoreUrl = Annotated[SecretStr, AfterValidator(_store_url)]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_database)]


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    def check(value: str) -> str:
        parse(value)
        return value

    return AfterValidator(check)


MessageRules = Annotated[str, _parsed_by(parse_rules)]
RoutesText = Annotated[str, _parsed_by(parse_routes)]
PageUrl = Annotated[str, AfterValidator(_page_url)]
ExternalUrl = Annotated[str, AfterValidator(_external_url)]
HostAndPort = Annotated[str, AfterValidator(_host_and_port)]
HostName = Annotated[str, AfterValidator(_host_name)]
Channels = Annotated[Mapping[str, tuple[SecretStr, ...]], BeforeValidator(_channels)]
