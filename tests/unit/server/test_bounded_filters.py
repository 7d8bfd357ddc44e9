"""Every filter that can be given several times is bounded, on every route."""

from __future__ import annotations

import pytest

from tests.support.api_world import World, openapi_document
from trainmedic_server.api.query_types import MOST_VALUES

SEVERAL = [
    (path, parameter["name"])
    for path, methods in openapi_document()["paths"].items()
    for operation in methods.values()
    for parameter in operation.get("parameters", [])
    if parameter["in"] == "query"
    and any(form.get("type") == "array" for form in (parameter["schema"], *parameter["schema"].get("anyOf", [])))
]


def test_there_are_such_filters() -> None:
    """Otherwise the test below would hold for nothing."""
    assert {("/history", "node"), ("/history", "by"), ("/jobs", "name")} <= set(SEVERAL)


@pytest.fixture(scope="module")
def world() -> World:
    """One for all: to build it takes longer than to ask it."""
    return World()


@pytest.mark.parametrize(("path", "name"), SEVERAL)
async def test_a_filter_takes_a_few_values_and_refuses_more(world: World, path: str, name: str) -> None:
    """Each value costs the store a search; with thousands one request held up everybody else."""
    async with world.client() as client:
        answer = await client.get(path, params=[(name, f"x{n}=y") for n in range(MOST_VALUES + 1)])
    assert answer.status_code == 422
    assert answer.json()["detail"] == f"{name}: must have at most {MOST_VALUES} values"
