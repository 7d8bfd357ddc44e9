"""The server's settings: one frozen value, and how flags and environment variables become one.

Every field says its unit, its default and the reason for it; ``docs/reference/settings.md`` lists
the same, and a test keeps the two together. Flags win over the environment. An empty variable
counts as unset, because that is how charts and compose files write "not given".

Not here: how values are read and checked (``values``). Who calls it: ``cli.serve`` makes its flags from `SOURCES` and
reads the settings with `load`; ``wiring.server`` is handed the result. Nothing else reads the environment, but the
agent's settings and the clients' ``--server`` and ``--token``.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError

from trainmedic.settings import key_reader
from trainmedic.wire.signing import Signer
from trainmedic_core import setting_sources
from trainmedic_core.setting_sources import PREFIX, SettingSource
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.settings.integrations import IntegrationSettings
from trainmedic_server.settings.notifications import NotificationSettings, SlackSettings
from trainmedic_server.settings.values import (
    AnyCaseLogLevel,
    AnyCaseMode,
    DatabaseUrl,
    ExpandedPath,
    HostAndPort,
    HostName,
    HttpUrl,
    LogFormat,
    PositiveDuration,
    RedisUrl,
    SigningKey,
    StoreUrl,
    TakeoverDuration,
)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _listed(value: Any) -> Any:
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


def _network(value: Any) -> Any:
    if isinstance(value, ipaddress.IPv4Network | ipaddress.IPv6Network):
        return value
    try:
        return ipaddress.ip_network(value)
    except ValueError:
        raise ValueError("must be an address or a network, such as 10.0.3.7 or 10.0.3.0/24") from None


class AccessSettings(BaseModel):
    """Which proxies are believed, and whose users may act."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    trusted_proxies: Annotated[
        tuple[Annotated[Network, BeforeValidator(_network)], ...],
        BeforeValidator(_listed),
        SettingSource("TRAINMEDIC_TRUSTED_PROXIES", "--trusted-proxy", "CIDR", shown_default="none"),
    ] = Field(
        (),
        description="Networks, with commas between, from which X-Forwarded-User and X-Forwarded-Groups are believed: "
        "those of a proxy that signs people in, as oauth2-proxy does. Whoever it names may look. None by default, "
        "because anybody can send these headers.",
    )
    operator_groups: Annotated[
        tuple[str, ...],
        BeforeValidator(_listed),
        SettingSource("TRAINMEDIC_OPERATOR_GROUPS", "--operator-groups", "NAMES", shown_default="none"),
    ] = Field(
        (),
        description="Groups, with commas between, whose members may act where such a proxy names them. None by "
        "default: they may look only.",
    )


class ServerSettings(IntegrationSettings, SlackSettings, NotificationSettings, AccessSettings):
    """Everything that can be set of a server when it starts."""

    host: Annotated[str, SettingSource("TRAINMEDIC_HOST", "--host")] = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. Loopback, because a server without tokens must not be reached from outside.",
    )
    port: Annotated[int, SettingSource("TRAINMEDIC_PORT", "--port", "NUMBER")] = Field(
        8080, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one. 8080 is what receivers expect."
    )
    playbooks: Annotated[
        tuple[ExpandedPath, ...],
        SettingSource("TRAINMEDIC_PLAYBOOKS", "--playbooks", "DIR", repeatable=True, shown_default="playbooks"),
    ] = Field(
        (Path("playbooks"),),
        min_length=1,
        description="Directory (or file) with playbooks; the flag can be repeated, the variable takes several "
        "with a colon between.",
    )
    alert_map: Annotated[
        tuple[ExpandedPath, ...],
        SettingSource("TRAINMEDIC_ALERT_MAP", "--alert-map", "FILE", repeatable=True, shown_default="none"),
    ] = Field(
        (),
        description="File that says which alerts are accepted, and which alerts of your own rules mean the shipped "
        "ones; or the name of a shipped map, such as kube-prometheus, or shipped for all. Given as playbooks are; the "
        "first entry that takes an alert wins. None by default: every alert is accepted under its own name.",
    )
    log_rules: Annotated[
        tuple[ExpandedPath, ...],
        SettingSource("TRAINMEDIC_LOG_RULES", "--log-rules", "DIR", repeatable=True, shown_default="the shipped rules"),
    ] = Field(
        (), description="Directory (or file) with log rules, given as playbooks are. Those beside playbooks count."
    )
    state_dir: Annotated[
        ExpandedPath,
        SettingSource("TRAINMEDIC_STATE_DIR", "--state-dir", "DIR", shown_default="~/.local/state/trainmedic"),
    ] = Field(
        Path("~/.local/state/trainmedic"),
        description="Directory of what must outlive a restart: the SQLite file, the embedded Redis and its URL. "
        "In the home directory, so that no privilege is needed.",
    )
    database: Annotated[
        DatabaseUrl | None,
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
    takeover: Annotated[
        TakeoverDuration, SettingSource("TRAINMEDIC_TAKEOVER_AFTER", "--takeover-after", "DURATION")
    ] = Field(
        timedelta(seconds=8),
        description="With PostgreSQL: silence of the server that works after which another takes over. One that ends "
        "is followed in a second or two; this is for one that hangs. 8 seconds, so that a hang is over in 10, and a "
        "slow commit is no reason.",
    )
    advertise: Annotated[HostAndPort | None, SettingSource("TRAINMEDIC_ADVERTISE", "--advertise", "HOST:PORT")] = Field(
        None,
        description="With PostgreSQL: where other servers reach this one; those that stand by hand on to it what they "
        "are asked. None by default: they answer 503.",
    )
    redis: Annotated[
        RedisUrl | None, SettingSource("TRAINMEDIC_REDIS_URL", "--redis", "URL", secret=True, shown_default="embedded")
    ] = Field(
        None,
        description="redis://, rediss:// or redis+sentinel:// URL that agents and jobs reach too. Embedded by "
        "default, which serves this machine only, and is for trying out.",
    )
    mode: Annotated[AnyCaseMode, SettingSource("TRAINMEDIC_MODE", "--mode", "MODE")] = Field(
        Mode.OBSERVE,
        description="The most that any playbook may do: observe (record what would be done), approve (ask first), "
        "enforce. Observe by default, so that nothing is changed before somebody has looked.",
    )
    tokens: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_TOKENS_FILE", "--tokens", "FILE")] = Field(
        None,
        description="YAML list of {name, sha256, roles}: who may call the API. None by default, which is accepted "
        "on loopback only.",
    )
    signing_key: Annotated[SigningKey | None, SettingSource("TRAINMEDIC_SIGNING_KEY", secret=True)] = Field(
        None,
        description="Key with which commands, replies and presences are signed (HMAC-SHA256). Without one, whoever "
        "can write to Redis can command agents and jobs, and speak for them. No flag, because other users can see a "
        "command line.",
    )
    previous_signing_key: Annotated[
        SigningKey | None, SettingSource("TRAINMEDIC_PREVIOUS_SIGNING_KEY", secret=True, can_be_withdrawn=True)
    ] = Field(
        None,
        description="A key that counts beside the signing key, while one takes the place of the other: both sign, "
        "and what either has signed is genuine.",
    )
    allow_anonymous: Annotated[bool, SettingSource("TRAINMEDIC_ALLOW_ANONYMOUS", value="BOOLEAN")] = Field(
        False,
        description="true: listen beyond loopback although no tokens are configured. No flag, so that it is rare.",
    )
    allowed_hosts: Annotated[
        tuple[HostName, ...],
        SettingSource("TRAINMEDIC_ALLOWED_HOSTS", "--allowed-hosts", "NAME", repeatable=True, shown_default="none"),
    ] = Field(
        (),
        description="Without tokens: name, such as trainmedic.example.org or *.example.org, that the server answers to "
        "beside addresses, localhost, names without a dot and *.svc; the flag can be repeated, the variable takes "
        "several with a colon between. None by default, because a web page can make any other name point here.",
    )
    connections_per_client: Annotated[
        int, SettingSource("TRAINMEDIC_CONNECTIONS_PER_CLIENT", "--connections-per-client", "NUMBER")
    ] = Field(
        512,
        ge=1,
        le=700,
        description="Connections that one address may hold without having shown a token; for one more, the one that "
        "was silent longest is closed. 512 of the 700 in all, so that one address leaves room for others, and a proxy "
        "that all clients come through has enough.",
    )
    max_age: Annotated[PositiveDuration, SettingSource("TRAINMEDIC_MAX_AGE", "--max-age", "DURATION")] = Field(
        timedelta(minutes=15),
        description="Age from which an alert is stale, and no repair starts for it. 15 minutes, because the world "
        "that an older one describes has changed.",
    )
    retention: Annotated[PositiveDuration, SettingSource("TRAINMEDIC_RETENTION", "--retention", "DURATION")] = Field(
        timedelta(days=90),
        description="Age from which closed runs, their events and alerts, findings and verdicts are deleted; runs that "
        "are open or owe an undo, and what trainmedic keep has locked, never are. Time in which no server was at work "
        "does not count. 90 days, to cover a quarter's review.",
    )
    archive: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_ARCHIVE", "--archive", "DIRECTORY")] = Field(
        None,
        description="Directory into which runs are written, as gzipped NDJSON, before --retention deletes them; it is "
        "made when the server starts, and while it is away or cannot be written nothing is deleted. Servers that share "
        "a database share it too. None by default, and old runs are gone.",
    )
    alertmanager: Annotated[
        HttpUrl | None, SettingSource("TRAINMEDIC_ALERTMANAGER_URL", "--alertmanager", "URL", secret=True)
    ] = Field(
        None,
        description="Alertmanager's own URL, used to ask whether an alert still fires, and for silences. None by "
        "default, because the webhook alone suffices.",
    )
    alertmanager_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_ALERTMANAGER_TOKEN_FILE", "--alertmanager-token", "FILE")
    ] = Field(
        None,
        description="File with the bearer token for Alertmanager's API, read for each call so that it can be renewed.",
    )
    prometheus: Annotated[
        HttpUrl | None, SettingSource("TRAINMEDIC_PROMETHEUS_URL", "--prometheus-url", "URL", secret=True)
    ] = Field(
        None,
        description="URL of the Prometheus that scrapes jobs, agents and this server, for reports, and to measure "
        "whether repairs helped. None by default: reports then have what the run store knows.",
    )
    prometheus_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_PROMETHEUS_TOKEN_FILE", "--prometheus-token", "FILE")
    ] = Field(
        None,
        description="File with the bearer token for Prometheus's API, read for each call so that it can be renewed.",
    )
    log_store: Annotated[StoreUrl | None, SettingSource("TRAINMEDIC_LOG_STORE", "--log-store", "URL", secret=True)] = (
        Field(None, description="Where lines of logs are searched. None by default: then the agents are asked.")
    )
    assume_resolved_after: Annotated[
        PositiveDuration, SettingSource("TRAINMEDIC_ASSUME_RESOLVED_AFTER", "--assume-resolved-after", "DURATION")
    ] = Field(
        timedelta(hours=12),
        description="Silence after which an alert counts as resolved, so that no undo waits for ever. 12 hours are "
        "three of Alertmanager's default repeat intervals. Time in which no server listened does not count.",
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
    breaker_window: Annotated[
        PositiveDuration, SettingSource("TRAINMEDIC_BREAKER_WINDOW", "--breaker-window", "DURATION")
    ] = Field(
        timedelta(minutes=10),
        description="Time over which the breaker counts distinct nodes acted on. 10 minutes outlast one cause.",
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
    http_secrets: Annotated[Mapping[str, SecretStr], SettingSource("TRAINMEDIC_HTTP_", secret=True, family=True)] = (
        Field(
            {},
            description="Bearer tokens that http.request may send, each under a name of your choice, such as "
            "TRAINMEDIC_HTTP_TICKETS. A playbook names the variable, so that the token is in no file of it.",
        )
    )
    inventory: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_INVENTORY", "--inventory", "FILE")] = Field(
        None,
        description="YAML mapping from address or other name to node name, for alerts that name a node so. It goes "
        "before what agents and cluster know. None by default: an address that nothing maps is refused, never guessed.",
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
        "job of a pod, and to use what it states about pods in verdicts. false where the account may not list pods.",
    )
    log_level: Annotated[AnyCaseLogLevel, SettingSource("TRAINMEDIC_LOG_LEVEL", "--log-level", "LEVEL")] = Field(
        "info", description="Least level of the log lines on standard error: debug, info, warning, error."
    )
    log_format: Annotated[LogFormat, SettingSource("TRAINMEDIC_LOG_FORMAT", "--log-format", "FORMAT")] = Field(
        "auto", description="Form of the log lines: json, text, or auto: text where a terminal shows them, else json."
    )

    @property
    def database_url(self) -> str:
        """The run store's URL: the one that is set, else that of the SQLite file in the state directory."""
        if self.database is not None:
            return self.database.get_secret_value()
        return f"sqlite:///{self.state_dir.resolve() / 'trainmedic.db'}"

    _read_keys: Callable[[], Sequence[bytes]] | None = PrivateAttr(None)

    @property
    def signer(self) -> Signer | None:
        """Signs and checks with the keys that are set. Those in files are read again while the server runs."""
        if self._read_keys is not None:
            return Signer(self._read_keys)
        keys = [key for key in (self.signing_key, self.previous_signing_key) if key is not None]
        # Trimmed as the SDK trims them, because a file often ends in a newline.
        return Signer.of(*(key.get_secret_value().encode().strip() for key in keys)) if self.signing_key else None

    @property
    def kubeconfig(self) -> Path | None:
        """The file that names the cluster; None for the cluster that the server runs in."""
        return None if self.kubernetes == "in-cluster" else Path(self.kubernetes).expanduser()

    @property
    def limits(self) -> EngineLimits:
        """The settings that the engine needs."""
        return EngineLimits(**{name: getattr(self, name) for name in EngineLimits.__struct_fields__})


def _source(name: str) -> SettingSource:
    return next(part for part in ServerSettings.model_fields[name].metadata if isinstance(part, SettingSource))


_PARTS = (AccessSettings, NotificationSettings)
_NAMES = sorted(ServerSettings.model_fields, key=lambda name: [name in part.model_fields for part in _PARTS])
SOURCES: Mapping[str, SettingSource] = {name: _source(name) for name in _NAMES}
"""The source of each setting, by its field's name, in the order of the documentation."""

# Variables with the same prefix that the clients, the agent, the jobs and the container image read.
_NAMES_OF_OTHERS = ("URL", "TOKEN", "TOKEN_FILE", "JOB", "NODE", "POLICY", "EXPORTER_HOST", "EXPORTER_PORT", "CONFIG")
_OF_OTHER_PROGRAMS = frozenset(PREFIX + name for name in (*_NAMES_OF_OTHERS, "LOG_DIR"))


def explain(
    error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str], sources: Mapping[str, SettingSource]
) -> Iterator[str]:
    """A line for each value that is wrong, in the words of our messages rather than pydantic's."""
    for detail in error.errors(include_url=False, include_context=False):
        message = re.sub(r"^(Value error|Assertion failed), ", "", detail["msg"])
        message = re.sub(r"^Input should be ", "must be ", message)
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if name not in origins:
            yield message
        elif sources[name].secret or _may_hold_a_password(values[name]):
            yield f"{origins[name]}: {message}"
        else:
            yield f"{origins[name]}: {_shown(values[name])}: {message}"


def _may_hold_a_password(value: Any) -> bool:
    """Return whether it looks like a URL with a user, even in a setting that takes no URL."""
    text = str(value)
    return "://" in text and "@" in text


def _shown(value: Any) -> str:
    return repr(os.pathsep.join(map(str, value))) if isinstance(value, tuple) else repr(str(value))


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ServerSettings:
    """The settings that `flags` (by field name; None where not given) and `environ` make.

    Raises ConfigurationError, which names every flag or variable that is wrong, its value unless
    it is a secret, and what is allowed.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, source in SOURCES.items():
        if setting := setting_sources.read(source, flags.get(name), environ):
            values[name], origins[name] = setting
    if "previous_signing_key" in values and "signing_key" not in values:
        raise ConfigurationError(f"{origins['previous_signing_key']}: is set, and TRAINMEDIC_SIGNING_KEY is not")
    try:
        loaded = ServerSettings(**values)
    except ValidationError as error:
        raise ConfigurationError("\n".join(explain(error, values, origins, SOURCES))) from None
    loaded._read_keys = key_reader(None, setting_sources.without_empty(environ))
    return loaded


def misspelt(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that look like a setting but are none, each with the most similar setting's variable."""
    return setting_sources.misspelt(environ, SOURCES.values(), _OF_OTHER_PROGRAMS)
