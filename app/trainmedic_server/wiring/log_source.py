"""Selection of the source of job logs: the configured log store, or else the agents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

from pydantic import SecretStr

from trainmedic_server.adapters.agent_logs import AgentLogs
from trainmedic_server.adapters.log_stores import loki, opensearch, victorialogs
from trainmedic_server.adapters.log_stores.paging import LineStore, StoredLogs
from trainmedic_server.adapters.log_stores.store_http import StoreHttp
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.ports.logs import LogSource
from trainmedic_server.ports.outside import Clock, CommandBus

MakeStore = Callable[[str, str, Path | None], tuple[StoreHttp, LineStore]]
"""Arguments: URL, tenant (for OpenSearch the index) or "", token file."""
_TENANT, _TOKEN_FILE = "tenant", "token_file"


def log_source(url: SecretStr | None, stack: contextlib.AsyncExitStack, bus: CommandBus, clock: Clock) -> LogSource:
    if url is None:
        return AgentLogs(bus, clock)
    http, store = store_at(url.get_secret_value())
    stack.push_async_callback(http.close)
    return StoredLogs(store, clock)


def store_at(url: str) -> tuple[StoreHttp, LineStore]:
    """Return the store of a URL such as ``loki+http://host:3100?tenant=team-a``. Raises ConfigurationError."""
    parts = urlsplit(url)
    kind, _, scheme = parts.scheme.partition("+")
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = sorted(options.keys() - {_TENANT, _TOKEN_FILE})
    if kind not in _STORES or unknown:
        fault = f"{unknown[0]} is not known" if unknown else f"{kind!r} is no store"
        raise ConfigurationError(
            f"--log-store: {fault}; a store is loki, victorialogs or opensearch, with tenant or token_file"
        )
    token = Path(options[_TOKEN_FILE]) if _TOKEN_FILE in options else None
    return _STORES[kind](urlunsplit((scheme, parts.netloc, parts.path, "", "")), options.get(_TENANT, ""), token)


def _loki(url: str, tenant: str, token: Path | None) -> tuple[StoreHttp, LineStore]:
    http = StoreHttp(url, {loki.TENANT: tenant} if tenant else {}, token)
    return http, loki.Loki(http)


def _victorialogs(url: str, tenant: str, token: Path | None) -> tuple[StoreHttp, LineStore]:
    http = StoreHttp(url, victorialogs.tenant_headers(tenant) if tenant else {}, token)
    return http, victorialogs.VictoriaLogs(http)


def _opensearch(url: str, index: str, token: Path | None) -> tuple[StoreHttp, LineStore]:
    http = StoreHttp(url, {}, token)
    return http, opensearch.OpenSearch(http, index or opensearch.INDEX)


_STORES: Mapping[str, MakeStore] = {"loki": _loki, "victorialogs": _victorialogs, "opensearch": _opensearch}
