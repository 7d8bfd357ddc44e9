"""The server's settings, from flags and environment variables.

Flags override variables; an empty variable counts as unset.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, SecretStr, ValidationError

from trainmedic.settings import key_reader
from trainmedic.wire.signing import Signer
from trainmedic_core import setting_sources
from trainmedic_core.problems import did_you_mean
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
    ExpandedPaths,
    HostAndPort,
    HostName,
    HttpUrl,
    LogFormat,
    PageUrl,
    PositiveDuration,
    RedisUrl,
    SettingGroup,
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


class AccessSettings(SettingGroup):
    trusted_proxies: Annotated[
        tuple[Annotated[Network, BeforeValidator(_network)], ...],
        BeforeValidator(_listed),
        SettingSource("TRAINMEDIC_TRUSTED_PROXIES", "--trusted-proxy", "CIDR", shown_default="none"),
    ] = Field(
        (),
        description=(
            "Networks of proxies that sign users in, separated by commas. Only their X-Forwarded-User and "
            "X-Forwarded-Groups are trusted. Such users may view."
        ),
    )
    operator_groups: Annotated[
        tuple[str, ...],
        BeforeValidator(_listed),
        SettingSource("TRAINMEDIC_OPERATOR_GROUPS", "--operator-groups", "NAMES", shown_default="none"),
    ] = Field(
        (),
        description="Groups of such users that may also act, separated by commas.",
    )


class ServerSettings(IntegrationSettings, SlackSettings, NotificationSettings, AccessSettings):
    host: Annotated[str, SettingSource("TRAINMEDIC_HOST", "--host")] = Field(
        "127.0.0.1",
        min_length=1,
        description=("Address to listen on. Without tokens only loopback."),
    )
    port: Annotated[int, SettingSource("TRAINMEDIC_PORT", "--port", "NUMBER")] = Field(
        8080, ge=0, le=65535, description="TCP port to listen on; 0 selects a free one."
    )
    playbooks: Annotated[
        ExpandedPaths,
        SettingSource("TRAINMEDIC_PLAYBOOKS", "--playbooks", "DIR", repeatable=True, shown_default="playbooks"),
    ] = Field((Path("playbooks"),), description="Directory (or file) with playbooks. Repeatable.")
    alert_map: Annotated[
        tuple[ExpandedPath, ...],
        SettingSource("TRAINMEDIC_ALERT_MAP", "--alert-map", "FILE", repeatable=True, shown_default="none"),
    ] = Field(
        (),
        description=(
            "File that selects and renames alerts, or a shipped map, such as kube-prometheus, or shipped for all. "
            "Repeatable; the first matching entry wins."
        ),
    )
    log_rules: Annotated[
        tuple[ExpandedPath, ...],
        SettingSource("TRAINMEDIC_LOG_RULES", "--log-rules", "DIR", repeatable=True, shown_default="the shipped rules"),
    ] = Field(
        (),
        description=("Directory (or file) with log rules. Repeatable. Rules next to playbooks always count."),
    )
    state_dir: Annotated[
        ExpandedPath,
        SettingSource("TRAINMEDIC_STATE_DIR", "--state-dir", "DIR", shown_default="~/.local/state/trainmedic"),
    ] = Field(
        Path("~/.local/state/trainmedic"),
        description=("Directory of the SQLite file and the embedded Redis, which must survive restarts."),
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
        description=(
            "URL of the run store: sqlite:////path/to/file, or postgresql://user:password@host/database, which several "
            "servers can share."
        ),
    )
    takeover: Annotated[
        TakeoverDuration, SettingSource("TRAINMEDIC_TAKEOVER_AFTER", "--takeover-after", "DURATION")
    ] = Field(
        timedelta(seconds=8),
        description=(
            "With PostgreSQL: silence of the leader after which a standby takes over, 3s to 1h. 8 seconds, so that a "
            "slow commit causes no takeover."
        ),
    )
    advertise: Annotated[HostAndPort | None, SettingSource("TRAINMEDIC_ADVERTISE", "--advertise", "HOST:PORT")] = Field(
        None,
        description="With PostgreSQL: address to which standbys forward requests. Without it they answer 503.",
    )
    redis: Annotated[
        RedisUrl | None, SettingSource("TRAINMEDIC_REDIS_URL", "--redis", "URL", secret=True, shown_default="embedded")
    ] = Field(
        None,
        description=(
            "redis://, rediss:// or redis+sentinel:// URL that agents and jobs reach too. The embedded Redis is for "
            "trials on one machine."
        ),
    )
    mode: Annotated[AnyCaseMode, SettingSource("TRAINMEDIC_MODE", "--mode", "MODE")] = Field(
        Mode.OBSERVE,
        description=("Limit for all playbooks: observe (only record), approve (ask first) or enforce."),
    )
    tokens: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_TOKENS_FILE", "--tokens", "FILE")] = Field(
        None,
        description="YAML list of {name, sha256, roles}: the callers of the API. Required beyond loopback.",
    )
    signing_key: Annotated[SigningKey | None, SettingSource("TRAINMEDIC_SIGNING_KEY", secret=True)] = Field(
        None,
        description=(
            "Key that signs messages. Without it, anyone who can write to Redis can command agents and jobs. No "
            "flag: other users can see a command line."
        ),
    )
    previous_signing_key: Annotated[
        SigningKey | None, SettingSource("TRAINMEDIC_PREVIOUS_SIGNING_KEY", secret=True, can_be_withdrawn=True)
    ] = Field(
        None,
        description="Second key during a rotation: both sign, either is accepted.",
    )
    allow_anonymous: Annotated[bool, SettingSource("TRAINMEDIC_ALLOW_ANONYMOUS", value="BOOLEAN")] = Field(
        False,
        description="true: listen beyond loopback without tokens.",
    )
    allowed_hosts: Annotated[
        tuple[HostName, ...],
        SettingSource("TRAINMEDIC_ALLOWED_HOSTS", "--allowed-hosts", "NAME", repeatable=True, shown_default="none"),
    ] = Field(
        (),
        description=(
            "Without tokens: an accepted Host name, such as *.example.org, in addition to addresses, localhost, "
            "names without a dot and *.svc. Repeatable. Others are refused, because a web page can point them here."
        ),
    )
    connections_per_client: Annotated[
        int, SettingSource("TRAINMEDIC_CONNECTIONS_PER_CLIENT", "--connections-per-client", "NUMBER")
    ] = Field(
        512,
        ge=1,
        le=700,
        description=(
            "Most connections of one address without a token; another closes the one silent longest. 512 of 700 in "
            "total leave capacity for others."
        ),
    )
    max_age: Annotated[PositiveDuration, SettingSource("TRAINMEDIC_MAX_AGE", "--max-age", "DURATION")] = Field(
        timedelta(minutes=15),
        description=(
            "Age over which an alert is stale and starts no repair. 15 minutes, because later the situation has "
            "changed."
        ),
    )
    retention: Annotated[PositiveDuration, SettingSource("TRAINMEDIC_RETENTION", "--retention", "DURATION")] = Field(
        timedelta(days=90),
        description=(
            "Age at which closed runs, alerts, findings and verdicts are deleted, except pending undos and what "
            "trainmedic keep has locked. Time without a running server does not count. 90 days cover a quarter."
        ),
    )
    archive: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_ARCHIVE", "--archive", "DIRECTORY")] = Field(
        None,
        description=(
            "Directory for runs as gzipped NDJSON, written before --retention deletes them. Servers with a common "
            "database share it."
        ),
    )
    alertmanager: Annotated[
        HttpUrl | None, SettingSource("TRAINMEDIC_ALERTMANAGER_URL", "--alertmanager", "URL", secret=True)
    ] = Field(
        None,
        description=("Alertmanager's URL, to check whether alerts still fire, to silence them, and to raise own ones."),
    )
    alertmanager_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_ALERTMANAGER_TOKEN_FILE", "--alertmanager-token", "FILE")
    ] = Field(
        None,
        description=("File with the bearer token for Alertmanager's API, read for each call."),
    )
    prometheus: Annotated[
        HttpUrl | None, SettingSource("TRAINMEDIC_PROMETHEUS_URL", "--prometheus-url", "URL", secret=True)
    ] = Field(
        None,
        description=(
            "URL of the Prometheus that scrapes jobs, agents and this server, for reports, effects and playbooks' "
            "queries."
        ),
    )
    prometheus_token: Annotated[
        ExpandedPath | None, SettingSource("TRAINMEDIC_PROMETHEUS_TOKEN_FILE", "--prometheus-token", "FILE")
    ] = Field(
        None,
        description="File with the bearer token for Prometheus's API, read for each call.",
    )
    runbooks: Annotated[
        PageUrl, SettingSource("TRAINMEDIC_RUNBOOK_URL", "--runbook-url", "URL", shown_default="none")
    ] = Field(
        "",
        description=(
            "URL of the page docs/on-call.md where your team reads it, for the runbook_url of alerts that the server "
            "raises."
        ),
    )
    log_store: Annotated[StoreUrl | None, SettingSource("TRAINMEDIC_LOG_STORE", "--log-store", "URL", secret=True)] = (
        Field(
            None,
            description=(
                "URL of the log store to search: loki+, victorialogs+ or opensearch+ before http:// or https://. "
                "Default: the agents."
            ),
        )
    )
    assume_resolved_after: Annotated[
        PositiveDuration, SettingSource("TRAINMEDIC_ASSUME_RESOLVED_AFTER", "--assume-resolved-after", "DURATION")
    ] = Field(
        timedelta(hours=12),
        description=(
            "Silence after which an alert counts as resolved. 12 hours are three of Alertmanager's default repeat "
            "intervals. Time without a running server does not count."
        ),
    )
    max_body: Annotated[int, SettingSource("TRAINMEDIC_MAX_BODY_BYTES", "--max-body-bytes", "BYTES")] = Field(
        8 * 1024 * 1024,
        ge=1024,
        le=1024**3,
        description="Largest webhook body in bytes; larger ones get 413. 8 MiB hold some 8,000 alerts.",
    )
    queue: Annotated[int, SettingSource("TRAINMEDIC_QUEUE", "--queue", "NUMBER")] = Field(
        1000,
        ge=1,
        le=1_000_000,
        description=("Most deliveries that wait for admission; further ones get 503. Limits the memory."),
    )
    breaker_window: Annotated[
        PositiveDuration, SettingSource("TRAINMEDIC_BREAKER_WINDOW", "--breaker-window", "DURATION")
    ] = Field(
        timedelta(minutes=10),
        description="Period over which the breaker counts distinct nodes acted on. 10 minutes outlast one cause.",
    )
    breaker_share: Annotated[float, SettingSource("TRAINMEDIC_BREAKER_SHARE", "--breaker-share", "SHARE")] = Field(
        0.5,
        gt=0,
        le=1,
        description=(
            "Share of the known nodes, above 0 and up to 1, over which the breaker opens. If half of a cluster is "
            "unhealthy, its nodes are not the cause."
        ),
    )
    breaker_min_nodes: Annotated[
        int, SettingSource("TRAINMEDIC_BREAKER_MIN_NODES", "--breaker-min-nodes", "NUMBER")
    ] = Field(
        10,
        ge=1,
        description=(
            "Number of nodes acted on that never opens the breaker. 10, so that two repairs do not stop a small "
            "cluster."
        ),
    )
    http_secrets: Annotated[Mapping[str, SecretStr], SettingSource("TRAINMEDIC_HTTP_", secret=True, family=True)] = (
        Field(
            {},
            description=(
                "Secrets and file paths for HTTP calls, such as TRAINMEDIC_HTTP_TICKETS. Playbooks contain only the "
                "variable's name."
            ),
        )
    )
    inventory: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_INVENTORY", "--inventory", "FILE")] = Field(
        None,
        description=("YAML mapping from address or other name to node name. It overrides agents and cluster."),
    )
    modes: Annotated[ExpandedPath | None, SettingSource("TRAINMEDIC_MODES", "--modes", "FILE")] = Field(
        None,
        description=(
            "YAML file with the mode of parts of the cluster, such as 'modes: [{nodes: {pool: canary}, mode: "
            "enforce}]', instead of --mode."
        ),
    )
    kubernetes: Annotated[str, SettingSource("TRAINMEDIC_KUBERNETES", "--kubernetes", "CLUSTER")] = Field(
        "off",
        min_length=1,
        description=("Cluster for k8s.* actions: in-cluster (the pod's service account), a kubeconfig file, or off."),
    )
    kubernetes_watch: Annotated[bool, SettingSource("TRAINMEDIC_KUBERNETES_WATCH", value="BOOLEAN")] = Field(
        True,
        description=("With a cluster: watch its nodes and pods. false if the account may not list pods."),
    )
    log_level: Annotated[AnyCaseLogLevel, SettingSource("TRAINMEDIC_LOG_LEVEL", "--log-level", "LEVEL")] = Field(
        "info", description="Lowest level of log lines: debug, info, warning, error."
    )
    log_format: Annotated[LogFormat, SettingSource("TRAINMEDIC_LOG_FORMAT", "--log-format", "FORMAT")] = Field(
        "auto", description="Format of log lines: json, text, or auto (text on a terminal)."
    )

    @property
    def database_url(self) -> str:
        """URL of the run store. Default: the SQLite file in the state directory."""
        if self.database is not None:
            return self.database.get_secret_value()
        return f"sqlite:///{self.state_dir.resolve() / 'trainmedic.db'}"

    _read_keys: Callable[[], Sequence[bytes]] | None = PrivateAttr(None)  # set by `load`

    @property
    def signer(self) -> Signer | None:
        """Signer and verifier with the configured keys, whose files are reread; None without a key."""
        if self._read_keys is not None:
            return Signer(self._read_keys)
        keys = [key for key in (self.signing_key, self.previous_signing_key) if key is not None]
        # Trim like the SDK: files often end with a newline.
        return Signer.of(*(key.get_secret_value().encode().strip() for key in keys)) if self.signing_key else None

    @property
    def kubeconfig(self) -> Path | None:  # None within a pod; only for a value other than ``off``
        try:
            return None if self.kubernetes == "in-cluster" else setting_sources.expanded(self.kubernetes)
        except ValueError as error:
            raise ConfigurationError(f"--kubernetes: {error}") from error

    @property
    def limits(self) -> EngineLimits:
        """The limits of the settings themselves, without those of the modes file."""
        names = EngineLimits.__struct_fields__
        return EngineLimits(**{name: getattr(self, name) for name in names if name in ServerSettings.model_fields})


def _source(name: str) -> SettingSource:
    return next(part for part in ServerSettings.model_fields[name].metadata if isinstance(part, SettingSource))


_PARTS = (AccessSettings, NotificationSettings)  # documented last
_NAMES = sorted(ServerSettings.model_fields, key=lambda name: [name in part.model_fields for part in _PARTS])
# The source of each setting by field name, in the order of the documentation.
SOURCES: Mapping[str, SettingSource] = {name: _source(name) for name in _NAMES}

_OTHER_NAMES = "URL TOKEN TOKEN_FILE JOB NODE POLICY EXPORTER_HOST EXPORTER_PORT CONFIG LOG_DIR"
# Variables with the same prefix that the clients, the agent, the jobs and the container image read.
OF_OTHER_PROGRAMS = frozenset(PREFIX + name for name in _OTHER_NAMES.split())


def explain(
    error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str], sources: Mapping[str, SettingSource]
) -> Iterator[str]:
    """Yield a line for each invalid value, without secrets."""
    for detail in error.errors(include_url=False, include_context=False):
        message = re.sub(r"^(Value error|Assertion failed), ", "", detail["msg"])
        message = re.sub(r"^Input should be ", "must be ", message)
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if name not in origins:
            yield message
        elif sources[name].secret or _may_hold_a_password(values[name]):
            yield f"{origins[name]}: {message}"
        else:
            is_choice = detail["type"] in ("enum", "literal_error")
            hint = did_you_mean(str(values[name]), re.findall(r"'([^']+)'", message)) if is_choice else ""
            yield f"{origins[name]}: {_shown(values[name])}: {message}{hint}"


def _may_hold_a_password(value: Any) -> bool:
    text = str(value)
    return "://" in text and "@" in text


def _shown(value: Any) -> str:
    return repr(os.pathsep.join(map(str, value))) if isinstance(value, tuple) else repr(str(value))


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ServerSettings:
    """Return the settings. Raises ConfigurationError with all lines of `explain`."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, source in SOURCES.items():
        if setting := setting_sources.read(source, flags.get(name), environ):
            values[name], origins[name] = setting
    if "previous_signing_key" in values and "signing_key" not in values:
        raise ConfigurationError(f"{origins['previous_signing_key']}: is set without TRAINMEDIC_SIGNING_KEY; set both")
    try:
        loaded = ServerSettings(**values)
    except ValidationError as error:
        raise ConfigurationError("\n".join(explain(error, values, origins, SOURCES))) from None
    loaded._read_keys = key_reader(None, setting_sources.without_empty(environ))
    return loaded


def misspelt(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return variables that look like settings but are unknown, each with the most similar variable."""
    return setting_sources.misspelt(environ, SOURCES.values(), OF_OTHER_PROGRAMS)
