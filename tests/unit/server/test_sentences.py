"""The words in which the API refuses a value."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainmedic_server.http.problems import sentence


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: Annotated[int, Field(ge=1)] = 1
    note: Annotated[str, Field(max_length=3, pattern="^a")] = "a"
    mode: Literal["observe", "enforce"] = "observe"
    dry_run: bool = False
    labels: dict[str, str] = {}
    jobs: list[str] = []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("count", 0, "must be greater than or equal to 1"),
        ("count", "x", "must be a whole number"),
        ("note", "abcd", "must have at most 3 characters"),
        ("note", "b", "must have the form ^a"),
        ("note", 5, "must be text"),
        ("mode", "x", "must be 'observe' or 'enforce'"),
        ("dry_run", "perhaps", "must be true or false"),
        ("labels", [], "must be a JSON object"),
        ("jobs", "x", "must be a list"),
        ("unknown", 1, "is not known here"),
    ],
)
def test_a_refusal_says_what_the_value_must_be(field: str, value: object, said: str) -> None:
    """And nothing of how it was found out."""
    with pytest.raises(ValidationError) as caught:
        Body.model_validate({field: value})
    [problem] = caught.value.errors()
    assert sentence(problem["msg"]) == said
