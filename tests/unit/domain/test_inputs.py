"""Reading of typed inputs."""

from __future__ import annotations

from typing import Any

import pytest

from trainmedic_server.domain.inputs import InputType, read_value


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
