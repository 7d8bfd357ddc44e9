"""What the tests need of OpenSearch, in memory: putting documents in, and ``_search`` with filters, sort and size.

It refuses what OpenSearch refuses by default: more than 10,000 hits, an unknown kind of query, sorting by a text field,
a time that is none, an index name with characters that cannot be.

Documents also come by ``_bulk``, through the pipeline where one is given (``ingest_pipeline`` says what of it is
modelled). Not modelled: index templates and mappings, data streams, life-cycles, several indexes, access control.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.log_stores import ingest_pipeline
from trainmedic_server.adapters.log_stores.stored_fields import nanoseconds_of, rfc3339

LARGEST_WINDOW = 10_000


@dataclass
class OpenSearchStandIn:
    """One index."""

    documents: list[dict[str, Any]] = field(default_factory=list)
    pipeline: Mapping[str, Any] | None = None
    """What documents of ``_bulk`` go through."""

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/{index}/_doc", self.index, methods=["POST"]),
                Route("/{index}/_search", self.search, methods=["POST"]),
                Route("/_bulk", self.bulk, methods=["POST"]),
            ]
        )

    async def bulk(self, request: Request) -> Response:
        lines = [json.loads(line) for line in (await request.body()).decode().splitlines() if line]
        for action, document in zip(lines[::2], lines[1::2], strict=True):
            assert action.keys() == {"create"}, "a data stream takes no other action"
            made = ingest_pipeline.run(self.pipeline, document, datetime.now(UTC)) if self.pipeline else document
            nanoseconds_of(made["@timestamp"])
            self.documents.append(made)
        items = [{"create": {"status": 201, "result": "created"}} for _ in lines[::2]]
        return JSONResponse({"took": 1, "errors": False, "items": items})

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
