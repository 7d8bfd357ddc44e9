"""Settings of the agent, from flags and environment variables."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainmedic import settings as sdk
from trainmedic.errors import ConfigurationError
from trainmedic.wire.connection import open_client
from trainmedic.wire.signing import Signer
from trainmedic_core import setting_sources
from trainmedic_core.setting_sources import SettingSource

LOG_LEVELS = ("debug", "info", "warning", "error")
_NODE = re.compile(r"[^\s\x00-\x1f\x7f]{1,253}")
_SHORT_KEY = 16  # bytes from which on a key is hard to guess
_LEAST_MEMORY = 96  # MiB; a reader without files takes about 50


class ReaderStart(StrEnum):
    CHILD = "child"
    EXTERNAL = "external"
    """A supervisor such as systemd or the kubelet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    node: str
    policy: Path | None
    redis: str | None = field(repr=False)
    signing_key: bytes | None = field(repr=False)
    previous_signing_key: bytes | None = field(repr=False)
    state_dir: Path
    exporter_host: str
    exporter_port: int
    log_store_token: str | None = field(repr=False)
    reader: ReaderStart
    reader_user: str | None
    reader_memory: int  # bytes
    log_level: str
    # Returns the signing key, then the previous one. Files are read again each time. None without a key.
    read_keys: Callable[[], Sequence[bytes]] | None = field(default=None, repr=False)

    def find_redis(self) -> str | None:
        """Return the configured Redis URL, or one that a server stored, if any."""
        return self.redis if self.redis is not None else sdk.read_url(self.state_dir / sdk.URL_FILE)

    @property
    def signer(self) -> Signer | None:
        if self.read_keys is not None:
            return Signer(self.read_keys)
        if self.signing_key is None:
            return None
        return Signer.of(self.signing_key, *filter(None, [self.previous_signing_key]))

    @property
    def has_short_key(self) -> bool:
        return self.signing_key is not None and len(self.signing_key) < _SHORT_KEY


class AgentSetting(Struct, frozen=True):
    source: SettingSource
    default: Callable[[], Any]
    read: Callable[[str], Any]
    description: str


def _node(text: str) -> str:
    if not _NODE.fullmatch(text):
        raise ValueError("must be the node's name as its alerts give it, without spaces, at most 253 characters")
    return text


def _signing_key(text: str) -> bytes:
    key = text.encode().strip()
    if not key:
        raise ValueError("must not be blank: anyone could sign with an empty key")
    return key


def _url(text: str) -> str:
    open_client(text).close()
    return text


def _port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or int(text) > 65535:
        raise ValueError("must be a port, 0 to 65535")
    return int(text)


def _reader(text: str) -> ReaderStart:
    if text not in list(ReaderStart):
        raise ValueError(f"must be {' or '.join(ReaderStart)}")
    return ReaderStart(text)


def _memory(text: str) -> int:
    if not re.fullmatch(r"\d{1,7}", text, re.ASCII) or int(text) < _LEAST_MEMORY:
        raise ValueError(f"must be a number of MiB, {_LEAST_MEMORY} or more")
    return int(text) * 1024**2


def _level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ValueError(f"must be one of {', '.join(LOG_LEVELS)}")
    return text.lower()


def _nothing() -> None:
    return None


_STATE = "~/.local/state/trainmedic"

SETTINGS: Mapping[str, AgentSetting] = {
    "node": AgentSetting(
        SettingSource("TRAINMEDIC_NODE", "--node", "NAME", shown_default="host name"),
        socket.gethostname,
        _node,
        "This node's name in alerts. Default: the host name, which most exporters report.",
    ),
    "policy": AgentSetting(
        SettingSource("TRAINMEDIC_POLICY", "--policy", "FILE", shown_default="none"),
        _nothing,
        setting_sources.expanded,
        "YAML file with what commands may do on this node. Without it the agent only reads.",
    ),
    "redis": AgentSetting(
        SettingSource(
            "TRAINMEDIC_REDIS_URL",
            "--redis",
            "URL",
            secret=True,
            shown_default="the embedded Redis of the same user on the same machine",
        ),
        _nothing,
        _url,
        "The server's redis://, rediss:// or redis+sentinel:// URL.",
    ),
    "signing_key": AgentSetting(
        SettingSource("TRAINMEDIC_SIGNING_KEY", secret=True, shown_default="none"),
        _nothing,
        _signing_key,
        "The server's key or this node's. Without it, anyone who can write to Redis can command this agent within "
        "its policy. No flag: other users can see a command line.",
    ),
    "previous_signing_key": AgentSetting(
        SettingSource("TRAINMEDIC_PREVIOUS_SIGNING_KEY", secret=True, shown_default="none", can_be_withdrawn=True),
        _nothing,
        _signing_key,
        "Second key during a rotation.",
    ),
    "state_dir": AgentSetting(
        SettingSource("TRAINMEDIC_STATE_DIR", "--state-dir", "DIR", shown_default=_STATE),
        lambda: setting_sources.expanded(_STATE),
        setting_sources.expanded,
        "Directory of the agent's journal, on a disk of this node.",
    ),
    "exporter_host": AgentSetting(
        SettingSource("TRAINMEDIC_EXPORTER_HOST", "--exporter-host", "TEXT", shown_default="127.0.0.1"),
        lambda: "127.0.0.1",
        str,
        "Address of the metrics; 0.0.0.0 for a Prometheus elsewhere. Loopback, because the endpoint has no password.",
    ),
    "exporter_port": AgentSetting(
        SettingSource("TRAINMEDIC_EXPORTER_PORT", "--exporter-port", "NUMBER", shown_default="9445"),
        lambda: 9445,
        _port,
        "TCP port of the metrics; 0 selects a free one. 9445 is usual for GPU exporters.",
    ),
    "log_store_token": AgentSetting(
        SettingSource("TRAINMEDIC_LOG_STORE_TOKEN", secret=True, shown_default="none"),
        _nothing,
        str,
        "Bearer token, or user:password, of the store that lines are pushed to, if `logs.ship` in the policy names "
        "no `token_file`.",
    ),
    "reader": AgentSetting(
        SettingSource("TRAINMEDIC_READER", "--reader", "WAY", shown_default="child"),
        lambda: ReaderStart.CHILD,
        _reader,
        "Starter of the process that reads logs: child (the agent) or external (`trainmedic agent-reader`).",
    ),
    "reader_user": AgentSetting(
        SettingSource("TRAINMEDIC_READER_USER", "--reader-user", "USER", shown_default="trainmedic-reader"),
        _nothing,
        str,
        "User, by name or number, who reads logs. Default: trainmedic-reader if the node has that user, else "
        "2100000017, or 60999 in a user namespace without that number. An agent that may not change the user reads "
        "as its own.",
    ),
    "reader_memory": AgentSetting(
        SettingSource("TRAINMEDIC_READER_MEMORY", "--reader-memory", "MIB", shown_default="256"),
        lambda: 256 * 1024**2,
        _memory,
        "Memory limit of the process that reads logs, in MiB. At the limit only that process restarts.",
    ),
    "log_level": AgentSetting(
        SettingSource("TRAINMEDIC_LOG_LEVEL", "--log-level", "LEVEL", shown_default="info"),
        lambda: "info",
        _level,
        "Lowest level of log lines: debug, info, warning, error.",
    ),
}
assert (*SETTINGS, "read_keys") == tuple(setting.name for setting in fields(AgentSettings))

# Variables of other programs with the same prefix: the server may share the environment.
_OF_OTHER_PROGRAMS = frozenset(
    {"TRAINMEDIC_JOB", "TRAINMEDIC_URL", "TRAINMEDIC_TOKEN", "TRAINMEDIC_PORT", "TRAINMEDIC_HOST"}
)


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> AgentSettings:
    """Raises ConfigurationError with every invalid setting.

    `flags`: by field name, None if not given.
    """
    values: dict[str, Any] = {}
    mistakes: list[str] = []
    for name, setting in SETTINGS.items():
        value = setting_sources.read(setting.source, flags.get(name), environ)
        if value is None:
            values[name] = setting.default()
            continue
        text, origin = value
        try:
            values[name] = setting.read(str(text))
        except ValueError as error:
            mistakes.append(f"{origin}: {error}" if setting.source.secret else f"{origin}: {text!r}: {error}")
    if values.get("previous_signing_key") and not values.get("signing_key"):
        mistakes.append("TRAINMEDIC_PREVIOUS_SIGNING_KEY: is set, and TRAINMEDIC_SIGNING_KEY is not")
    if mistakes:
        raise ConfigurationError("\n".join(mistakes))
    return AgentSettings(**values, read_keys=sdk.key_reader(None, setting_sources.without_empty(environ)))


def misspelt(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return unknown variables, each with the most similar setting."""
    return setting_sources.misspelt(environ, [setting.source for setting in SETTINGS.values()], _OF_OTHER_PROGRAMS)
