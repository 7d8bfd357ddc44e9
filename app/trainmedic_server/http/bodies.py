"""Request bodies that handlers read themselves, and their OpenAPI schema."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from trainmedic_server.errors import PayloadError
from trainmedic_server.http.body import BodyReader, parse_json
from trainmedic_server.http.limits import KIB
from trainmedic_server.http.problems import sentence

_BODY_BYTES = 16 * KIB
_Body = TypeVar("_Body", bound=BaseModel)


async def read_body(bodies: BodyReader, request: Request, model: type[_Body]) -> _Body:
    """Read the optional body as `model`, within a limit and after authentication, unlike FastAPI."""
    async with bodies.read(request, _BODY_BYTES) as raw:
        document = parse_json(raw) if raw.strip() else {}
    try:
        return model.model_validate(document, strict=True)
    except ValidationError as error:
        problems = [(".".join(map(str, each["loc"])), sentence(each["msg"])) for each in error.errors()[:20]]
        raise PayloadError.at(problems) from None


def body_schema(model: type[BaseModel]) -> dict[str, Any]:  # `factory` must list the model for the OpenAPI document
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    is_required = any(field.is_required() for field in model.model_fields.values())
    return {"requestBody": {"required": is_required, "content": {"application/json": {"schema": schema}}}}
