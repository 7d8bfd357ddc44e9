"""Reading a policy's mappings: right values, and every mistake at its place."""

from __future__ import annotations

from datetime import timedelta

import pytest

from app.agent.sections import Section, size
from app.catalog import yaml_text
from app.catalog.problems import Problem


def section(text: str) -> Section:
    documents, wrong = yaml_text.read(text, "policy.yaml")
    assert not wrong
    return Section(documents[0], (), [])


def told(problems: list[Problem]) -> list[str]:
    return [str(problem) for problem in problems]


def test_values_are_read_by_their_kind() -> None:
    """Text, flags, numbers, durations, sizes, lists, and mappings within mappings."""
    top = section(
        "a: x\nb: true\nc: 3\nd: 2.5\ne: 1h30m\nf: 200GB\ng: [p, q]\nh: {i: keep}\nrules: {one: {k: 1}, two: {k: 2}}"
    )
    assert top.text("a") == "x"
    assert top.flag("b") is True
    assert top.whole("c", 0, 10) == 3
    assert top.number("d", 0, 10) == 2.5
    assert top.duration("e") == timedelta(minutes=90)
    assert top.size("f") == 200 * 10**9
    assert top.texts("g") == ("p", "q")
    assert top.section("h").choice("i", ["keep", "drop"]) == "keep"
    assert [(name, one.whole("k", 0, 9)) for name, one in top.named("rules")] == [("one", 1), ("two", 2)]
    top.close()
    assert top.problems == []


def test_what_is_not_written_has_its_default() -> None:
    """A key without a value counts as not written."""
    top = section("a:\nz: 1")
    assert top.text("a", "x") == "x"
    assert top.whole("b", 0, 9, 4) == 4
    assert top.duration("c", timedelta(seconds=5)) == timedelta(seconds=5)
    assert top.size("d", 10) == 10
    assert top.texts("e", ()) == ()
    assert top.section("f").flag("g", True) is True
    assert list(top.named("h")) == []
    assert "z" in top
    assert top.problems == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text: 3", "text: must be text, not 3"),
        ("flag: 'yes'", "flag: must be true or false, not 'yes'"),
        ("whole: 11", "whole: must be a whole number from 0 to 10, not 11"),
        ("whole: true", "whole: must be a whole number from 0 to 10, not True"),
        ("number: .nan", "number: must be a number from 0 to 10, not nan"),
        ("duration: 5", "duration: 5 is not a duration; write it with its unit: 90s, 10m, 7d"),
        ("duration: 0s", "duration: must be longer than 0s"),
        ("size: 5 apples", "size: '5 apples' is no size; write bytes, or a number with its unit: 200GB, 512MiB"),
        ("texts: []", "texts: must not be empty"),
        ("texts: a", "texts: must be a list, not 'a'"),
        ("choice: kep", "choice: 'kep' is not one of keep, drop; did you mean 'keep'?"),
        ("named: [a]", "named: must be a mapping (name: value)"),
        ("named: {'a b': {}}", "'a b' is no name: letters, digits, and '-', '_', '.' between them; at most 128"),
        ("section: 3", "section: must be a mapping (name: value)"),
        ("txet: a", "unknown key 'txet'; did you mean 'text'?"),
    ],
)
def test_a_mistake_is_told_at_its_place(text: str, message: str) -> None:
    """In plain words, with the file, line and column; and once."""
    top = section(f"other: 1\n{text}")
    top.whole("other", 0, 10, 0)
    top.text("text", "x")
    top.flag("flag", False)
    top.whole("whole", 0, 10, 0)
    top.number("number", 0, 10, 0)
    top.duration("duration", timedelta(seconds=1))
    top.size("size", 1)
    if "texts" in top:
        top.texts("texts")
    top.choice("choice", ["keep", "drop"], "keep")
    list(top.named("named"))
    top.section("section")
    top.close()
    assert [problem.message for problem in top.problems] == [message]
    assert top.problems[0].line == 2


def test_each_item_of_a_list_is_looked_at() -> None:
    """The position is that of the item."""
    top = section("roots:\n  - /tmp\n  - 3\n")
    assert top.texts("roots") == ("/tmp",)
    assert told(top.problems) == ["policy.yaml:3:5: roots[1]: must be text"]


def test_what_must_be_there_is_asked_for() -> None:
    """The message names the mapping that lacks it."""
    top = section("rules: {one: {a: 1}}")
    for _, one in top.named("rules"):
        one.text("glob")
    assert told(top.problems) == ["policy.yaml:1:14: rules.one: 'glob' is missing"]


@pytest.mark.parametrize(("text", "expected"), [(7, 7), ("7", 7), ("1.5kB", 1500), ("2 KiB", 2048), ("1TiB", 2**40)])
def test_sizes_have_units(text: object, expected: int) -> None:
    """Decimal and binary ones are told apart."""
    assert size(text) == expected
