"""LogsQL queries of VictoriaLogs and their answers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence

from trainmedic_logs.domain.log_search import LogQuery
from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.adapters.log_stores.paging import StoredLine, StoredPage
from trainmedic_server.adapters.log_stores.store_http import StoreHttp
from trainmedic_server.adapters.log_stores.stored_fields import (
    equal_fields,
    kernel_nodes,
    level_names,
    nanoseconds_of,
    quoted,
    rfc3339,
    stored_line,
)
from trainmedic_server.errors import ConfigurationError, LogsUnavailable

PATH = "/select/logsql/query"
_TENANT = re.compile(r"(\d{1,10})(?::(\d{1,10}))?")


def tenant_headers(tenant: str) -> Mapping[str, str]:
    """Read ``12`` or ``12:3``: account and project. Raises ConfigurationError."""
    match = _TENANT.fullmatch(tenant)
    if match is None:
        raise ConfigurationError("a tenant of VictoriaLogs is the number of an account, or account:project")
    return {"AccountID": match[1], "ProjectID": match[2] or "0"}


class VictoriaLogs:
    greps = True

    def __init__(self, http: StoreHttp) -> None:
        self._http = http

    def parts(self, query: LogQuery, nodes: Collection[str]) -> Sequence[str]:
        common = []
        if query.level is not None:
            common.append(f"level:in({','.join(map(quoted, level_names(query.level)))})")
        if query.grep:
            common.append(f"_msg:~{quoted(query.grep)}")
        fields = [f"{name}:={quoted(str(value))}" for name, value in equal_fields(query).items()]
        parts = [" AND ".join([*fields, *common])]
        if query.pods:
            of_pods = ['source:="training"', f"pod:in({','.join(map(quoted, query.pods))})"]
            # Without the first field, the job, which containers do not know.
            parts.append(" AND ".join([*of_pods, *fields[1:], *common]))
        if asked := kernel_nodes(query, nodes):
            parts.append(" AND ".join(['source:="kernel"', f"node:in({','.join(map(quoted, asked))})", *common]))
        return parts

    async def page(self, part: str, query: LogQuery, begin: int, end: int, most: int) -> StoredPage:
        asked = f"_time:[{rfc3339(begin)}, {rfc3339(end)}) AND {part} | sort by (_time, _msg) limit {most}"
        # Without this, a cluster may be configured to leave out nodes that do not answer, and does not say so.
        raw = await self._http.post(PATH, {"query": asked, "allow_partial_response": "0"})
        try:
            return StoredPage([_line(json.loads(line)) for line in raw.splitlines() if line.strip()])
        except UNREADABLE as error:
            raise LogsUnavailable("the log store does not answer as VictoriaLogs does") from error


def _line(fields: Mapping[str, object]) -> StoredLine:
    named = {str(name): str(value) for name, value in fields.items() if not str(name).startswith("_")}
    return stored_line(nanoseconds_of(str(fields["_time"])), str(fields.get("_msg", "")), named)
