"""``/docs``: reference of the HTTP API, rendered from ``/openapi.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from trainmedic_server.console.page_request import PageRequest, accepts_gzip
from trainmedic_server.console.rendering import page as answer_page

_METHODS = ("get", "post", "put", "delete")


async def reference(page: PageRequest) -> Response:
    base = page.renderer.base
    document = await page.api.get("/openapi.json")
    text = page.renderer.text(
        "docs.html",
        title="HTTP API",
        info=document["info"],
        groups=_groups(document),
        address=base.external_url if base.link else f"http://{page.request.headers.get('host', '127.0.0.1:8080')}",
    )
    return answer_page(text, accepts_gzip=accepts_gzip(page.request))


def _groups(document: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method in _METHODS:
                tag = (operation.get("tags") or ["other"])[0]
                groups.setdefault(tag, []).append(_operation(document, path, method, operation))
    return groups


def _operation(document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> dict[str, Any]:
    body = operation.get("requestBody", {}).get("content", {})
    content: Mapping[str, Any] = next(iter(body.values()), {})
    schema = _resolved(document, content.get("schema", {}))
    example = next(iter(schema.get("examples", [])), None)
    return {
        "id": f"{method}-{path.strip('/').replace('/', '-') or 'root'}",
        "path": path,
        "method": method.upper(),
        "summary": operation.get("summary", ""),
        "description": operation.get("description", ""),
        "parameters": [_resolved(document, each) for each in operation.get("parameters", [])],
        "body": [
            {"name": name, "needed": name in schema.get("required", []), "type": _type(document, member), **member}
            for name, member in schema.get("properties", {}).items()
        ],
        "example": json.dumps(example) if example else "",
        "answers": {
            code: (answer.get("description", ""), _members(document, answer))
            for code, answer in operation.get("responses", {}).items()
        },
        "needs_token": bool(operation.get("security")),
    }


def _members(document: Mapping[str, Any], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = answer.get("content", {}).get("application/json", {})
    schema = _resolved(document, content.get("schema", {}))
    return [
        {"name": name, "type": _type(document, member), "description": member.get("description", "")}
        for name, member in schema.get("properties", {}).items()
    ]


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if not reference:
        return schema
    resolved: Any = document
    for part in reference.removeprefix("#/").split("/"):
        resolved = resolved[part]
    assert isinstance(resolved, Mapping)
    return resolved


def _type(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        resolved = _resolved(document, schema)
        return " | ".join(map(str, resolved["enum"])) if "enum" in resolved else schema["$ref"].rsplit("/", 1)[1]
    if "anyOf" in schema:
        return " | ".join(_type(document, each) for each in schema["anyOf"])
    kind = str(schema.get("type", "any"))
    return f"list of {_type(document, schema.get('items', {}))}" if kind == "array" else kind
