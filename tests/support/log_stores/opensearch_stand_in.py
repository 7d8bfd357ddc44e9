"""What the tests need of OpenSearch, in memory: putting documents in, and ``_search`` with filters, sort and size.

It refuses what OpenSearch refuses by default: more than 10,000 hits, an unknown kind of query, sorting by a text field,
a time that is none, an index name with characters that cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trainmedic_server.adapters.log_stores.store_times import nanoseconds_of, rfc3339

LARGEST_WINDOW = 10_000


@dataclass
class OpenSearchStandIn:
    """One index."""

    documents: list[dict[str, Any]] = field(default_factory=list)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/{index}/_doc", self.index, methods=["POST"]),
                Route("/{index}/_search", self.search, methods=["POST"]),
            ]
        )

    async def index(self, request: Request) -> Response:
        document = await request.json()
        nanoseconds_of(document["@timestamp"])
        self.documents.append(document)
        return JSONResponse({"_id": str(len(self.documents)), "result": "created"}, 201)

    async def search(self, request: Request) -> Response:
        body = await request.json()
        index = request.path_params["index"]
        if any(character in index for character in ' "\\<>|?/') or index != index.lower():
            return _error("invalid_index_name_exception", f"Invalid index name [{index}]")
        if body["size"] > LARGEST_WINDOW:
            return _error("illegal_argument_exception", "Result window is too large, from + size must be <= [10000]")
        if body["sort"] != [{"@timestamp": "asc"}]:
            return _error("illegal_argument_exception", "Text fields are not optimised for operations like sorting")
        hits = []
        try:
            for number, document in enumerate(self.documents):
                if all(_takes(each, document) for each in body["query"]["bool"]["filter"]):
                    at = rfc3339(nanoseconds_of(document["@timestamp"]))
                    hits.append({"_id": str(number), "_source": document, "fields": {"@timestamp": [at]}})
        except ValueError as error:
            return _error("parsing_exception", str(error))
        hits.sort(key=lambda hit: hit["fields"]["@timestamp"])
        return JSONResponse({"hits": {"total": {"value": len(hits)}, "hits": hits[: body["size"]]}})


def _takes(wanted: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    ((kind, inner),) = wanted.items()
    ((name, value),) = inner.items()
    stored = document.get(name)
    if kind == "term":
        return stored is not None and str(stored) == str(value)
    if kind == "terms":
        return stored in value
    if kind == "range":
        at = nanoseconds_of(str(stored))
        return nanoseconds_of(value["gte"]) <= at < nanoseconds_of(value["lt"])
    raise ValueError(f"unknown query [{kind}]")


def _error(kind: str, reason: str) -> Response:
    return JSONResponse({"error": {"type": kind, "reason": reason}, "status": 400}, 400)
