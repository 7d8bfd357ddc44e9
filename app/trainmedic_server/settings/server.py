"""The server's settings: one frozen tree, and how flags and environment variables become one.

Every field says its unit, its default and the reason for it; ``docs/reference/settings.md`` lists
the same, and a test keeps the two together. Flags win over the environment. An empty variable
counts as unset, because that is how charts and compose files write "not given".

Not here: whether the listening address needs tokens (``server.auth``), which takes the tokens file
to tell. Who calls it: ``cli.serve`` makes its flags from `OPTIONS` and reads the settings with `load`;
``wiring.server`` is handed the result. Nothing else reads the environment, the agent's settings and the
clients' ``--server`` and ``--token`` aside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from trainmedic_server.domain import duration
from trainmedic_server.domain.fields import Duration
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.settings import options
from trainmedic_server.settings.options import PREFIX, SettingSource

LogLevel = Literal["debug", "info", "warning", "error"]


class ServerSettings(BaseModel):
    """What a server is told when it starts."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    host: Annotated[str, SettingSource("TRAINMEDIC_HOST", "--host")] = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. Loopback, because a server without tokens must not be reached from outside.",
    )
    port: Annotated[int, SettingSource("TRAINMEDIC_PORT", "--port", "NUMBER")] = Field(
        8080, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one. 8080 is what receivers expect."
    )
    playbooks: Annotated[
        tuple[Path, ...],
        SettingSource("TRAINMEDIC_PLAYBOOKS", "--playbooks", "DIR", repeatable=True, shown_default="playbooks"),
    ] = Field(
        (Path("playbooks"),),
        min_length=1,
        description="Directory (or file) with playbooks; the flag can be repeated, the variable takes several "
        "with a colon between.",
    )
    state_dir: Annotated[
        Path, SettingSource("TRAINMEDIC_STATE_DIR", "--state-dir", "DIR", shown_default="~/.local/state/trainmedic")
    ] = Field(
        Path("~/.local/state/trainmedic"),
        description="Directory of what must outlive a restart: the SQLite file, the embedded Redis and its URL. "
        "In the home directory, so that no privilege is needed.",
    )
    database: Annotated[
        SecretStr | None,
        SettingSource(
            "TRAINMEDIC_DATABASE_URL",
            "--database",
            "URL",
            secret=True,
            shown_default="SQLite file in the state directory",
        ),
    ] = Field(
        None,
        description="URL of the run store: sqlite:////path/to/file, or postgresql://user:password@host/database, where "
        "several servers can share it. A file by default, because one server needs no database server.",
    )
    takeover: Annotated[Duration, SettingSource("TRAINMEDIC_TAKEOVER_AFTER", "--takeover-after", "DURATION")] = Field(
        timedelta(seconds=30),
        description="With PostgreSQL: silence of the server that works after which another takes over. One that ends "
        "is followed in a second or two; this is for one that hangs. 30 seconds, so that a slow commit is no reason.",
    )
    advertise: Annotated[str | None, SettingSource("TRAINMEDIC_ADVERTISE", "--advertise", "HOST:PORT")] = Field(
        None,
        description="With PostgreSQL: where other servers reach this one; those that stand by hand on to it what they "
        "are asked. None by default: they answer 503.",
    )
    redis: Annotated[
        SecretStr | None, SettingSource("TRAINMEDIC_REDIS_URL", "--redis", "URL", secret=True, shown_default="embedded")
    ] = Field(
        None,
        description="redis:// or rediss:// URL that agents and jobs reach too. Embedded by default, which serves "
        "this machine only.",
    )
    mode: Annotated[Mode, SettingSource("TRAINMEDIC_MODE", "--mode", "MODE")] = Field(
        Mode.OBSERVE,
        description="The most that any playbook may do: observe (record what would be done), approve (ask first), "
        "enforce. Observe by default, so that nothing is changed before somebody has looked.",
    )
    tokens: Annotated[Path | None, SettingSource("TRAINMEDIC_TOKENS_FILE", "--tokens", "FILE")] = Field(
        None,
        description="YAML list of {name, sha256, roles}: who may call the API. None by default, which is accepted "
        "on loopback only.",
    )
    signing_key: Annotated[SecretStr | None, SettingSource("TRAINMEDIC_SIGNING_KEY", secret=True)] = Field(
        None,
        description="Key with which commands are signed (HMAC-SHA256). Without one, whoever "
        "can write to Redis can command agents and jobs. No flag, because other users can see a command line.",
    )
    allow_anonymous: Annotated[bool, SettingSource("TRAINMEDIC_ALLOW_ANONYMOUS", value="BOOLEAN")] = Field(
        False,
        description="true: listen beyond loopback although no tokens are configured. No flag, so that it is rare.",
    )
    max_age: Annotated[Duration, SettingSource("TRAINMEDIC_MAX_AGE", "--max-age", "DURATION")] = Field(
        timedelta(minutes=15),
        description="Age from which an alert is stale, and no repair starts for it. 15 minutes, because the world "
        "that an older one describes has changed.",
    )
    retention: Annotated[Duration, SettingSource("TRAINMEDIC_RETENTION", "--retention", "DURATION")] = Field(
        timedelta(days=90),
        description="Age from which closed runs, their events and alerts are deleted; runs that are open or owe an "
        "undo never are. 90 days, to cover a quarter's review.",
    )
    alertmanager: Annotated[
        SecretStr | None, SettingSource("TRAINMEDIC_ALERTMANAGER_URL", "--alertmanager", "URL", secret=True)
    ] = Field(
        None,
        description="Alertmanager's own URL, used to ask whether an alert still fires, and for silences. None by "
        "default, because the webhook alone suffices.",
    )
    alertmanager_token: Annotated[
        Path | None, SettingSource("TRAINMEDIC_ALERTMANAGER_TOKEN_FILE", "--alertmanager-token", "FILE")
    ] = Field(
        None,
        description="File with the bearer token for Alertmanager's API, read for each call so that it can be renewed.",
    )
    assume_resolved_after: Annotated[
        Duration, SettingSource("TRAINMEDIC_ASSUME_RESOLVED_AFTER", "--assume-resolved-after", "DURATION")
    ] = Field(
        timedelta(hours=12),
        description="Silence after which an alert counts as resolved, so that no undo waits for ever. 12 hours are "
        "three of Alertmanager's default repeat intervals.",
    )
    max_body: Annotated[int, SettingSource("TRAINMEDIC_MAX_BODY_BYTES", "--max-body-bytes", "BYTES")] = Field(
        8 * 1024 * 1024,
        ge=1024,
        le=1024**3,
        description="Largest webhook body, in bytes, before it is refused with 413. 8 MiB hold a group of some 8,000 "
        "alerts.",
    )
    queue: Annotated[int, SettingSource("TRAINMEDIC_QUEUE", "--queue", "NUMBER")] = Field(
        1000,
        ge=1,
        le=1_000_000,
        description="Deliveries that may wait for admission before more are refused with 503. 1000 bound the memory, "
        "and Alertmanager sends a refused one again.",
    )
    breaker_window: Annotated[Duration, SettingSource("TRAINMEDIC_BREAKER_WINDOW", "--breaker-window", "DURATION")] = (
        Field(
            timedelta(minutes=10),
            description="Time over which the breaker counts distinct nodes acted on. 10 minutes outlast one cause.",
        )
    )
    breaker_share: Annotated[float, SettingSource("TRAINMEDIC_BREAKER_SHARE", "--breaker-share", "SHARE")] = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the known nodes, above 0 and up to 1, at which the breaker opens. When half of a "
        "cluster is ill, the cause is not in its nodes.",
    )
    breaker_min_nodes: Annotated[
        int, SettingSource("TRAINMEDIC_BREAKER_MIN_NODES", "--breaker-min-nodes", "NUMBER")
    ] = Field(
        10,
        ge=1,
        description="Fewest nodes acted on that can open the breaker. 10, so that a small cluster is not stopped by "
        "two repairs.",
    )
    notify_urls: Annotated[
        Mapping[str, tuple[SecretStr, ...]], SettingSource("TRAINMEDIC_NOTIFY_URLS", secret=True)
    ] = Field(
        {},
        description="Notification channels as name=url pairs with white space between, the URLs in Apprise's form; a "
        "name given again adds a URL to its channel. None by default. No flag, because the URLs hold credentials.",
    )
    http_secrets: Annotated[Mapping[str, SecretStr], SettingSource("TRAINMEDIC_HTTP_", secret=True, family=True)] = (
        Field(
            {},
            description="Bearer tokens that http.request may send, each under a name of your choice, such as "
            "TRAINMEDIC_HTTP_TICKETS. A playbook names the variable, so that the token is in no file of it.",
        )
    )
    inventory: Annotated[Path | None, SettingSource("TRAINMEDIC_INVENTORY", "--inventory", "FILE")] = Field(
        None,
        description="YAML mapping from address to node name, for alerts whose instance label is an address. None by "
        "default: such an alert is refused, never guessed.",
    )
    kubernetes: Annotated[str, SettingSource("TRAINMEDIC_KUBERNETES", "--kubernetes", "CLUSTER")] = Field(
        "off",
        min_length=1,
        description="The cluster that k8s.* actions work on: in-cluster (by the service account of the pod that the "
        "server runs in), or the path of a kubeconfig file. off by default, because nothing else needs a cluster.",
    )
    kubernetes_watch: Annotated[bool, SettingSource("TRAINMEDIC_KUBERNETES_WATCH", value="BOOLEAN")] = Field(
        True,
        description="Where there is a cluster: watch its nodes and pods, to find the node behind an address and the "
        "job of a pod. false where the account may not list pods.",
    )
    log_level: Annotated[LogLevel, SettingSource("TRAINMEDIC_LOG_LEVEL", "--log-level", "LEVEL")] = Field(
        "info", description="Least level of the JSON log lines on standard error: debug, info, warning, error."
    )

    @field_validator("log_level", "mode", mode="before")
    @classmethod
    def _fold(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("state_dir", "tokens", "alertmanager_token", "inventory", mode="after")
    @classmethod
    def _expand(cls, path: Path | None) -> Path | None:
        return path.expanduser() if path is not None else None

    @field_validator("playbooks", mode="after")
    @classmethod
    def _expand_each(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser() for path in paths)

    @field_validator("redis", "alertmanager")
    @classmethod
    def _is_url(cls, url: SecretStr | None, info: Any) -> SecretStr | None:
        schemes = ("redis", "rediss", "unix") if info.field_name == "redis" else ("http", "https")
        if url is not None and not url.get_secret_value().startswith(tuple(f"{scheme}://" for scheme in schemes)):
            raise ValueError("must be a URL that begins with " + " or ".join(f"{scheme}://" for scheme in schemes))
        return url

    @field_validator("database")
    @classmethod
    def _is_database(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and "://" not in url.get_secret_value():
            raise ValueError("must be a URL such as sqlite:////var/lib/trainmedic/trainmedic.db")
        return url

    @field_validator("takeover")
    @classmethod
    def _is_long_enough(cls, value: timedelta) -> timedelta:
        if not timedelta(seconds=3) <= value <= timedelta(hours=1):
            raise ValueError("must be from 3s to 1h")
        return value

    @field_validator("advertise")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        host, colon, port = value.rpartition(":")
        if not (colon and port.isdigit() and re.fullmatch(r"[\w.-]+|\[?[0-9A-Fa-f:.]+\]?", host)):
            raise ValueError("must be an address and a port, such as 10.1.2.3:8080 or [2001:db8::1]:8080")
        return f"[{host.strip('[]')}]:{port}" if ":" in host else value

    @field_validator("notify_urls", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return _channels(value) if isinstance(value, str) else value

    @field_validator("max_age", "retention", "assume_resolved_after", "breaker_window")
    @classmethod
    def _is_positive(cls, value: timedelta) -> timedelta:
        if value <= timedelta(0):
            raise ValueError("must be longer than 0s")
        return value

    @property
    def database_url(self) -> str:
        """Of the run store: the one given, else that of the SQLite file in the state directory."""
        if self.database is not None:
            return self.database.get_secret_value()
        return f"sqlite:///{self.state_dir.resolve() / 'trainmedic.db'}"

    @property
    def kubeconfig(self) -> Path | None:
        """The file that names the cluster; None for the cluster that the server runs in."""
        return None if self.kubernetes == "in-cluster" else Path(self.kubernetes).expanduser()

    @property
    def limits(self) -> EngineLimits:
        """What of it the engine is told."""
        return EngineLimits(
            mode=self.mode,
            max_age=self.max_age,
            assume_resolved_after=self.assume_resolved_after,
            breaker_window=self.breaker_window,
            breaker_share=self.breaker_share,
            breaker_min_nodes=self.breaker_min_nodes,
            queue=self.queue,
        )


def _option(name: str) -> SettingSource:
    return next(part for part in ServerSettings.model_fields[name].metadata if isinstance(part, SettingSource))


OPTIONS: Mapping[str, SettingSource] = {name: _option(name) for name in ServerSettings.model_fields}
"""How each setting is given, by its field's name, in the order of the documentation."""

# Variables of the same family that are not the server's.
_ELSEWHERE = frozenset(
    PREFIX + name
    for name in ("URL", "TOKEN", "TOKEN_FILE", "JOB", "NODE", "POLICY", "EXPORTER_HOST", "EXPORTER_PORT", "CONFIG")
)


def default_of(name: str) -> str:
    """The default as the documentation writes it."""
    option, value = OPTIONS[name], ServerSettings.model_fields[name].default
    if option.shown_default is not None:
        return option.shown_default
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return duration.write(value) if isinstance(value, timedelta) else str(value)


def choices_of(name: str) -> tuple[str, ...]:
    """The values that a setting can have, where they are few."""
    return {"mode": tuple(Mode), "log_level": get_args(LogLevel)}.get(name, ())


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ServerSettings:
    """The settings that `flags` (by field name; None where not given) and `environ` make.

    Raises ConfigurationError, which names every flag or variable that is wrong, its value unless
    it is a secret, and what is allowed.
    """
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, option in OPTIONS.items():
        found = options.given(option, flags.get(name), environ)
        if found is not None:
            given[name], origins[name] = found
    try:
        return ServerSettings(**given)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(error, given, origins))) from None


def misspelt(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that look like a setting but are none, each with the nearest that is one."""
    return options.misspelt(environ, OPTIONS.values(), _ELSEWHERE)


def _explain(error: ValidationError, given: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    for detail in error.errors(include_url=False, include_context=False):
        message = re.sub(r"^(Value error|Assertion failed), ", "", detail["msg"])
        message = re.sub(r"^Input should be ", "must be ", message)
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if name not in origins:
            yield message
        elif OPTIONS[name].secret:
            yield f"{origins[name]}: {message}"
        else:
            yield f"{origins[name]}: {_shown(given[name])}: {message}"


def _shown(value: Any) -> str:
    return repr(os.pathsep.join(map(str, value))) if isinstance(value, tuple) else repr(str(value))


def _channels(text: str) -> dict[str, tuple[str, ...]]:
    channels: dict[str, tuple[str, ...]] = {}
    for number, pair in enumerate(text.split(), 1):
        name, equals, url = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) or "://" not in url:
            raise ValueError(f"pair {number} is not name=url, such as oncall=slack://TokenA/TokenB/TokenC")
        channels[name] = (*channels.get(name, ()), url)
    return channels
