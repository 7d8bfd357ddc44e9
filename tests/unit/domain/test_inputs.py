"""Reading of typed inputs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from trainmedic_server.domain.inputs import Input, InputType, Value, read, read_value
from trainmedic_server.http.problems import from_validation


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        ("text", "a b", "a b"),
        ("number", "8", 8),
        ("number", "0.5", 0.5),
        ("number", 7, 7),
        ("duration", "90m", "1h30m"),
        ("time", "2026-01-31T13:00:00+01:00", "2026-01-31T12:00:00.000000Z"),
        ("nodes", "n1, n2 n1", ["n1", "n2"]),
        ("nodes", ["n1"], ["n1"]),
        ("nodes", "n[1-2],m7", ["n1", "n2", "m7"]),
        ("job", "llm-1", "llm-1"),
    ],
)
def test_a_value_is_read_into_its_form(kind: str, given: Any, value: Any) -> None:
    """The same for one from a command line and one from JSON."""
    assert read_value(InputType(kind), given) == value


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("text", ""),
        ("text", 5),
        ("text", "a\0b"),
        ("number", "nan"),
        ("number", "1_000x"),
        ("number", 10**400),
        ("duration", "90"),
        ("time", "tomorrow"),
        ("time", "2026-01-31T13:00:00"),
        ("nodes", " , "),
        ("nodes", "n1;reboot"),
        ("nodes", "n[1-2"),
        ("nodes", "n[1-99999]"),
        ("nodes", 5),
        ("job", "a b"),
    ],
)
def test_a_value_of_another_type_is_refused(kind: str, given: Any) -> None:
    """A time without its zone would be guessed."""
    with pytest.raises(ValueError, match=r"."):
        read_value(InputType(kind), given)


@pytest.mark.parametrize("given", [True, {"a": 1}, [1], [["a"]], None])
def test_a_value_of_no_type_is_one_problem(given: object) -> None:
    """Not one for each type that it might have had, under a name that no request has."""
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(dict[str, Value]).validate_python({"n": given})
    (problem,) = from_validation([{**each, "loc": ("body", *each["loc"])} for each in caught.value.errors()]).problems
    assert problem == ("n", "must be text, a number or a list of names")


def test_null_is_no_value() -> None:
    """So that a form may send each input."""
    declared = {"n": Input(type=InputType.NUMBER, default=5), "t": Input(type=InputType.TEXT, required=True)}
    read_ = read(declared, {"n": None, "t": None})
    assert (read_.values["n"], read_.problems) == (5, (("t", "is required; give a text"),))
