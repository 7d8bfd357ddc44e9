"""The subset of JSON Schema for the parameters of a job's own commands."""

from __future__ import annotations

from typing import Any

import pytest

import trainmedic
from trainmedic.errors import ConfigurationError
from trainmedic.wire import param_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "shard": {"type": "integer", "minimum": 0, "maximum": 100, "description": "Which one."},
        "why": {"type": "string", "minLength": 1, "maxLength": 5},
        "how": {"enum": ["fast", "safe"]},
        "ranks": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "more": {"type": "object", "properties": {"a": {"type": ["number", "null"]}}, "additionalProperties": True},
        "flag": {"type": "boolean"},
    },
    "required": ["shard"],
}


@pytest.mark.parametrize(
    "given",
    [
        {"shard": 0},
        {"shard": 7.0, "why": "a", "how": "safe", "ranks": [1, 2], "flag": True},
        {"shard": 1, "more": {"a": None, "b": {}}},
    ],
)
def test_fitting_parameters_have_no_problem(given: dict[str, Any]) -> None:
    """A whole float is an integer, as in JSON Schema."""
    param_schema.check(SCHEMA)
    assert list(param_schema.problems(SCHEMA, given)) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "shard is missing"),
        ({"shard": "1"}, "shard: must be integer"),
        ({"shard": True}, "shard: must be integer"),
        ({"shard": 1.5}, "shard: must be integer"),
        ({"shard": -1}, "shard: must be at least 0"),
        ({"shard": 101}, "shard: must be at most 100"),
        ({"shard": 1, "why": ""}, "why: must be at least 1 characters"),
        ({"shard": 1, "how": "slow"}, 'how: must be one of "fast", "safe"'),
        ({"shard": 1, "ranks": [1, "2"]}, "ranks[1]: must be integer"),
        ({"shard": 1, "ranks": [1, 2, 3]}, "ranks: must be at most 2 items"),
        ({"shard": 1, "more": {"a": "x"}}, "more.a: must be number or null"),
        ({"shard": 1, "flag": 1}, "flag: must be boolean"),
        ({"shard": 1, "hwo": "fast"}, "there is no parameter 'hwo'; did you mean 'how'?"),
    ],
)
def test_each_problem_is_named_with_its_member(given: dict[str, Any], told: str) -> None:
    """One problem each, by the path of the member."""
    assert list(param_schema.problems(SCHEMA, given)) == [told]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ([], "type: object"),
        ({"type": "string"}, "type: object"),
        ({"type": "object", "pattern": "(a+)+"}, "'pattern' is not supported"),
        ({"type": "object", "properties": {"a": {"$ref": "http://x"}}}, "properties.a: the keyword '$ref'"),
        ({"type": "object", "properties": {"a": {"type": "int"}}}, "properties.a.type: 'int' is not one of object"),
        ({"type": "object", "properties": {"a": {"type": ["string", None]}}}, "properties.a.type: None is not one of"),
        (
            {"type": "object", "properties": {"a": {"type": [["string"]]}}},
            "properties.a.type: ['string'] is not one of",
        ),
        ({"type": "object", "properties": {"a": 5}}, "properties.a must be a mapping"),
        ({"type": "object", "required": ["a"]}, "required must list names of its properties"),
        ({"type": "object", "properties": {"a": {"minimum": "1"}}}, "minimum must be a number"),
        ({"type": "object", "properties": {"a": {"enum": []}}}, "enum must list values"),
        ({"type": "object", "description": "x" * 5000}, "longer than 4096 bytes"),
        ({"type": "object", "description": {1, 2}}, "not JSON serializable"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_at_registration(schema: Any, told: str) -> None:
    """Rather than ignored when a command comes."""
    with trainmedic.connect(job="llm-1") as medic, pytest.raises(ConfigurationError) as refused:
        medic.on("acme.skip", schema=schema)
    assert told in str(refused.value)


def test_a_schema_goes_with_its_handler() -> None:
    """Neither the next handler of the action nor a refusal keeps it."""
    schema = {"type": "object", "properties": {"shard": {"type": "integer"}}, "required": ["shard"]}
    with trainmedic.connect(job="llm-1", rank=0, world_size=1) as medic:
        medic.on("acme.skip", schema=schema)(lambda command: None)
        medic.on("acme.move", schema=schema)(lambda command: None)
        assert medic._describe()["schemas"].keys() == {"acme.skip", "acme.move"}
        medic.on("acme.skip")(lambda command: None)
        medic.cannot("acme.move", "no shards")
        assert "schemas" not in medic._describe()
        assert medic._handlers.wrong_parameters("acme.skip", {}) is None


def test_actions_with_fixed_parameters_take_no_schema() -> None:
    """Playbooks are checked against those of the server."""
    with trainmedic.connect(job="llm-1") as medic, pytest.raises(ConfigurationError, match="fixed parameters"):
        medic.on("job.stop", schema={"type": "object"})


def test_a_number_that_is_none_is_beyond_every_limit() -> None:
    """NaN is neither less nor more than a limit."""
    schema = {"type": "object", "properties": {"a": {"type": "number", "minimum": 0, "maximum": 1}}}
    told = ["a: must be at least 0", "a: must be at most 1"]
    assert list(param_schema.problems(schema, {"a": float("nan")})) == told
