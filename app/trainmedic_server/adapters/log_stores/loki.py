"""Loki's LogQL queries and their answers.

Kernel lines have no job: they need a query by its nodes, and container lines one by its pods.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from trainmedic_logs.domain.log_search import LogQuery
from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.adapters.log_stores.paging import StoredLine, StoredPage
from trainmedic_server.adapters.log_stores.store_http import LONGEST_REASON, StoreHttp, read_json
from trainmedic_server.adapters.log_stores.stored_fields import (
    equal_fields,
    kernel_nodes,
    level_names,
    quoted,
    stored_line,
)
from trainmedic_server.errors import LogsUnavailable

PATH = "/loki/api/v1/query_range"
TENANT = "X-Scope-OrgID"


class Loki:
    greps = True

    def __init__(self, http: StoreHttp) -> None:
        self._http = http

    def parts(self, query: LogQuery, nodes: Collection[str]) -> Sequence[str]:
        level = [f"level=~{quoted('|'.join(level_names(query.level)))}"] if query.level is not None else []
        equal = {name: f"{name}={quoted(str(value))}" for name, value in equal_fields(query).items()}
        job, node = equal.pop("job"), [equal.pop("node")] if "node" in equal else []
        metadata = "".join(f" | {each}" for each in equal.values())
        grep = f" |~ {quoted(query.grep)}" if query.grep else ""
        parts = [_selector(job, *node, *level) + grep + metadata]
        if query.pods:
            of_pods = f" | pod=~{quoted('|'.join(map(re.escape, query.pods)))}"
            parts.append(_selector('job=""', 'source="training"', *node, *level) + grep + metadata + of_pods)
        if asked := kernel_nodes(query, nodes):
            of_nodes = f"node=~{quoted('|'.join(map(re.escape, asked)))}"
            parts.append(_selector('source="kernel"', of_nodes, *level) + grep)
        return parts

    async def page(self, part: str, query: LogQuery, begin: int, end: int, most: int) -> StoredPage:
        form = {"query": part, "start": str(begin), "end": str(end), "limit": str(most), "direction": "forward"}
        answer = read_json(await self._http.post(PATH, form))
        try:
            data = answer["data"]
            if data["resultType"] != "streams":
                raise LogsUnavailable("the log store does not answer with lines; is it Loki?")
            lines = [_line(stream["stream"], value) for stream in data["result"] for value in stream["values"]]
            warnings = answer.get("warnings") or ()
            return StoredPage(lines, [f"the log store warns: {str(each)[:LONGEST_REASON]}" for each in warnings])
        except UNREADABLE as error:
            raise LogsUnavailable("the log store does not answer as Loki does") from error


def _selector(*matchers: str) -> str:
    return "{" + ", ".join(matchers) + "}"


def _line(labels: dict[str, str], value: Sequence[Any]) -> StoredLine:
    return stored_line(int(value[0]), str(value[1]), {str(name): str(each) for name, each in labels.items()})
