"""The cleaning part of a policy: what is read, and what is refused in which words."""

from __future__ import annotations

import getpass
import os
from datetime import timedelta
from typing import Any

import pytest

from trainmedic_agent.disk import rules
from trainmedic_agent.mapping_reader import FieldFault

LEAST = {"roots": ["/scratch"], "globs": ["**"], "min_age": "7d"}


def faults(section: object) -> list[str]:
    found: list[FieldFault] = []
    rules.read_cleaning(section, found)
    return list(map(str, found))


def read(section: object) -> rules.CleaningPolicy:
    """The policy that a section without faults makes."""
    found: list[FieldFault] = []
    cleaning = rules.read_cleaning(section, found)
    assert not found
    return cleaning


def test_a_complete_rule_is_read() -> None:
    """Every key is read in the forms that a user would write."""
    raw = {
        **LEAST,
        "globs": "*/ckpt/*",
        "exclude": ["keep/**"],
        "kind": "checkpoints",
        "do": "delete",
        "age_by": "modified",
        "keep_newest": 3,
        "min_size": "1.5GiB",
        "max_size": 2_000_000_000_000,
        "when_free_below": 20,
        "max_files": 5000,
        "max_bytes": "2TB",
    }
    section = {"rules": {"old": raw}, "owners": [getpass.getuser(), 12345], "max_bytes": "500 GB"}
    cleaning = read(section)
    rule = cleaning.rules["old"]
    assert (rule.name, rule.roots, [glob.text for glob in rule.globs]) == ("old", ("/scratch",), ["*/ckpt/*"])
    assert (rule.kind, rule.do, rule.age_by) == (
        rules.EntryKind.CHECKPOINTS,
        rules.CleaningOperation.DELETE,
        rules.AgeBy.MODIFIED,
    )
    assert (rule.min_age, rule.keep_newest, rule.when_free_below) == (timedelta(days=7), 3, 20.0)
    assert (rule.min_size, rule.max_size, rule.max_bytes) == (3 * 2**29, 2 * 10**12, 2 * 10**12)
    assert cleaning.owners == {os.getuid(), 12345}
    assert (cleaning.max_files, cleaning.max_bytes) == (rules.DEFAULT_MAX_FILES, 500 * 10**9)


def test_a_policy_without_a_cleaning_part_allows_nothing() -> None:
    """An empty policy has no rule that a command could name."""
    assert read(None) == rules.CleaningPolicy()
    assert read({}).rules == {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"roots": []}, "roots: must not be empty"),
        ({"roots": None}, "roots is missing"),
        ({"roots": "scratch"}, "must be an absolute path"),
        ({"roots": ["/scratch/../etc"]}, "must be an absolute path"),
        ({"roots": ["/"]}, "roots.0: / cannot be a root"),
        ({"roots": ["/usr/local/tmp"]}, "belongs to the system"),
        ({"roots": ["/var/lib/containerd/io"]}, "belongs to the container runtime"),
        ({"roots": ["/a", "/a/b"]}, "are nested"),
        ({"roots": [7]}, "must be text"),
        ({"globs": ["/etc/*"]}, "relative to the roots"),
        ({"min_age": 7}, "7 is not a duration"),
        ({"min_age": "0s"}, "must be at least 1m"),
        ({"min_age": "1001y"}, "min_age: 365365d is too long; write at most 365000d"),
        ({"mni_age": "7d"}, "mni_age: is not known here; did you mean 'min_age'?"),
        ({"kind": "dirs"}, "must be files or checkpoints"),
        ({"kind": "checkpoints", "do": "truncate"}, "cannot be truncated"),
        ({"kind": "checkpoints", "do": "shrink", "keep_tail": "1MB"}, "cannot be shrunk"),
        ({"do": "shrink"}, "keep_tail: is missing"),
        ({"keep_tail": "1MB"}, "is only for do: shrink"),
        ({"do": "shrink", "keep_tail": "2MB", "min_size": "2MB"}, "must be less than min_size"),
        ({"keep_newest": True}, "must be a whole number"),
        ({"keep_newest": -1}, "must be a whole number from 0"),
        ({"min_size": "5 apples"}, "'5 apples' is not a size"),
        ({"min_size": 5, "max_size": 4}, "is below min_size"),
        ({"when_free_below": 100}, "above 0 and below 100"),
        ({"when_free_below": float("nan")}, "above 0 and below 100"),
    ],
)
def test_errors_in_a_rule_are_reported_with_their_place(change: dict[str, Any], told: str) -> None:
    """The message names the key and what to write there."""
    [fault] = faults({"rules": {"old": {**LEAST, **change}}})
    assert fault.startswith("cleaning.rules.old")
    assert told in fault


def test_all_errors_are_reported_at_once() -> None:
    """Errors in several rules and outside them come together, also where a rule is no mapping at all."""
    told = faults({"rules": {"a": {}, "b": None, "c d": LEAST, 4: LEAST}, "owners": ["nobody-has-this-name"], "max": 1})
    assert "cleaning.max: is not known here" in told[0]
    assert [line for line in told if line.startswith("cleaning.rules.a: ")] == [
        "cleaning.rules.a: roots is missing",
        "cleaning.rules.a: globs is missing",
        "cleaning.rules.a: min_age is missing",
    ]
    assert "cleaning.rules.b: must be a mapping (name: value), not nothing" in told
    assert any(line.startswith("cleaning.rules.c d: a rule's name") for line in told)
    assert any(line.startswith("cleaning.rules.4: a rule's name") for line in told)
    assert any("there is no user 'nobody-has-this-name'" in line for line in told)
    assert faults([1]) == ["cleaning: must be a mapping (name: value), not [1]"]


def test_a_log_may_be_truncated_at_any_age() -> None:
    """Its age is low as long as it is being written."""
    section = {"rules": {"logs": {**LEAST, "do": "truncate", "min_age": "0s"}}}
    assert read(section).rules["logs"].min_age == timedelta(0)
