"""A query parameter that a call does not have is refused: ignored, a misspelled filter would return everything."""

from __future__ import annotations

import pytest

from tests.support.api_world import World, openapi_document, payload
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole

CALLS = [
    (method.upper(), path)
    for path, methods in openapi_document()["paths"].items()
    for method in methods
    if path not in ("/webhook", "/events/{name}", "/health", "/ready", "/metrics")
]


@pytest.fixture(scope="module")
def world() -> World:
    """One for all: to build it takes longer than to ask it, and refused requests change nothing."""
    return World()


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_every_call_refuses_an_unknown_parameter(world: World, method: str, path: str) -> None:
    async with world.client() as client:
        answer = await client.request(method, path, params={"zzzzzz": "1"})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["field"] == "zzzzzz"
    assert answer.json()["detail"].startswith("zzzzzz: is not known here; ")


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("statu=failed", "statu: is not known here; did you mean 'status'?"),
        ("Owes-Undo=true", "Owes-Undo: is not known here; did you mean 'owes_undo'?"),
        ("is_open=true", "is_open: is not known here; did you mean 'open'?"),
        (
            "nod=a&limit=3&job=llm-1&jb=a&nod=b",
            "nod: is not known here; did you mean 'node'?; jb: is not known here; did you mean 'job'?",
        ),
    ],
)
async def test_the_nearest_known_parameter_is_named(world: World, query: str, detail: str) -> None:
    async with world.client() as client:
        answer = await client.get(f"/history?{query}")
    assert (answer.status_code, answer.json()["detail"]) == (422, detail)


async def test_without_a_near_name_the_known_ones_are_listed(world: World) -> None:
    async with world.client() as client:
        some = await client.get("/jobs/llm-1/report?colour=1")
        none = await client.get("/channels?colour=1")
    assert some.json()["detail"] == "colour: is not known here; known are: since, until"
    assert none.json()["detail"] == "colour: is not known here; this call takes no query parameters"


async def test_a_caller_without_a_token_gets_401() -> None:
    world = World(auth=Authenticator([Token("ann", b"", frozenset({TokenRole.VIEWER}))]))
    async with world.client() as client:
        answer = await client.get("/history?statu=failed")
    assert answer.status_code == 401


async def test_long_and_many_names_give_a_short_answer(world: World) -> None:
    async with world.client() as client:
        answer = await client.get("/history", params={"x" * 10_000: "1", **{f"unknown{n}": "1" for n in range(1_000)}})
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) == 20
    assert len(answer.content) < 20_000


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_and_scrapes_take_any_parameter(world: World, path: str) -> None:
    async with world.client() as client:
        assert (await client.get(f"{path}?proxy=1")).status_code == 200


@pytest.mark.parametrize("path", ["/webhook", "/webhook/"])
async def test_a_delivery_takes_any_parameter(world: World, path: str) -> None:
    """Alertmanager's URL is the operator's, and it never repeats a refused delivery."""
    async with world.client() as client:
        assert (await client.post(f"{path}?cluster=a&from=alertmanager", json=payload())).status_code == 200


@pytest.mark.parametrize("query", ["alertname=A&alertname=B", "label=a=b&since=1h&since=2h", "limit=1&limit=1"])
async def test_a_parameter_with_one_value_is_not_given_twice(world: World, query: str) -> None:
    """Only the last counted."""
    async with world.client() as client:
        answer = await client.get(f"/alerts?{query}")
        several = await client.get("/alerts?label=a=b&label=c=d")
    assert (answer.status_code, several.status_code) == (422, 200)
    assert (
        answer.json()["detail"]
        == f"{query.rpartition('&')[2].partition('=')[0]}: takes one value, and is given more than once"
    )
