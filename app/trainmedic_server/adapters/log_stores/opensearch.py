"""OpenSearch and Elasticsearch. The server applies patterns, because theirs differ from RE2 and match single words.

Container lines without a job, which other stores find by pods, are not searched.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from trainmedic_logs.domain.log_search import LogQuery
from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.adapters.log_stores.paging import StoredLine, StoredPage
from trainmedic_server.adapters.log_stores.store_http import StoreHttp, read_json
from trainmedic_server.adapters.log_stores.stored_fields import (
    equal_fields,
    kernel_nodes,
    level_names,
    nanoseconds_of,
    rfc3339,
    stored_line,
)
from trainmedic_server.errors import LogsUnavailable

INDEX = "logs-*"
_TIME = "@timestamp"
_FORMAT = "strict_date_optional_time_nanos"


class OpenSearch:
    greps = False

    def __init__(self, http: StoreHttp, index: str = INDEX) -> None:
        self._http = http
        self._path = f"/{quote(index, safe='*,-')}/_search?ignore_unavailable=true"

    def parts(self, query: LogQuery, nodes: Collection[str]) -> Sequence[str]:
        level = [{"terms": {"level": level_names(query.level)}}] if query.level is not None else []
        of_job = [{"term": {name: value}} for name, value in equal_fields(query).items()]
        parts = [json.dumps([*of_job, *level])]
        if asked := kernel_nodes(query, nodes):
            parts.append(json.dumps([{"term": {"source": "kernel"}}, {"terms": {"node": asked}}, *level]))
        return parts

    async def page(self, part: str, query: LogQuery, begin: int, end: int, most: int) -> StoredPage:
        filters = json.loads(part)
        filters.append({"range": {_TIME: {"gte": rfc3339(begin), "lt": rfc3339(end), "format": _FORMAT}}})
        body = {
            "size": most,
            "sort": [{_TIME: "asc"}],
            "query": {"bool": {"filter": filters}},
            "docvalue_fields": [{"field": _TIME, "format": _FORMAT}],
        }
        answer = read_json(await self._http.post(self._path, body=body))
        try:
            return StoredPage([_line(hit) for hit in answer["hits"]["hits"]], _gaps(answer))
        except UNREADABLE as error:
            raise LogsUnavailable("the log store does not answer as OpenSearch does") from error


def _gaps(answer: Mapping[str, Any]) -> list[str]:
    shards, clusters = answer.get("_shards", {}), answer.get("_clusters", {})
    gaps = []
    if failed := shards.get("failed"):
        gaps.append(f"{failed} of {shards.get('total')} shards of the log store failed: lines may be missing")
    if answer.get("timed_out"):
        gaps.append("the search timed out in the log store: lines may be missing")
    if any(clusters.get(each) for each in ("skipped", "partial", "failed")):
        gaps.append("clusters of the log store did not answer: lines may be missing")
    return gaps


def _line(hit: Mapping[str, Any]) -> StoredLine:
    source = hit["_source"]
    named = {str(name): str(value) for name, value in source.items() if isinstance(value, str | int)}
    text = str(named.pop("message", ""))
    named.pop(_TIME, None)
    stored = stored_line(nanoseconds_of(hit["fields"][_TIME][0]), text, named)
    return stored._replace(key=str(hit.get("_id", stored.key)))
