"""The reference page of the API says what the API does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from starlette.routing import Route

from tests.support.api_world import World, openapi_document
from trainmedic_server.api.schemas import WebhookReply
from trainmedic_server.auth.tokens import parse

PAGE = (Path(__file__).parents[3] / "docs/reference/http-api.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_call_is_in_the_table() -> None:
    """And nothing else is."""
    named = set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", PAGE.split("## Tokens")[0]))
    paths = openapi_document()["paths"]
    assert named == {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def test_every_schema_that_the_document_names_is_in_it() -> None:
    """Those of bodies that the handlers read themselves, too."""
    document = openapi_document()
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert named <= document["components"]["schemas"].keys()
    assert {"OrderBody", "EndingBody", "CloseBody", "EndBody", "ResumeBody", "ProblemDetails"} <= named
    assert "HTTPValidationError" not in named, "FastAPI's own errors, as which ours answer none"


def test_no_route_is_built_again_when_it_is_first_asked_for() -> None:
    """A router that is included would build all its routes a second time, which the first request waits for."""
    assert {type(route).__module__ for route in World().app.routes if not isinstance(route, Route)} == set()


def test_its_examples_are_sound() -> None:
    """The tokens file can be read, the JSON is what the models say."""
    (tokens,) = blocks("yaml")
    assert [token.name for token in parse(tokens, "page")] == ["alertmanager", "ann"]
    reply, problem = (json.loads(block) for block in blocks("json"))
    WebhookReply.model_validate(reply)
    assert problem["status"] == 422
