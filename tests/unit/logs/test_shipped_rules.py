"""The shipped rules on the corpus of real lines: one rule or none, as each line is marked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.logs.reading import lines
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES, SOURCES
from trainmedic_logs.lines.matcher import LineMatch, LineMatcher
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary

FOLDER = Path(__file__).parents[3] / "logs/trainmedic_logs/logrules"
CORPUS: list[dict[str, Any]] = yaml.load((FOLDER / "lines_fixture.yaml").read_bytes(), yaml.CSafeLoader)


def shipped() -> RuleSet:
    library = LogRuleLibrary([FOLDER])
    library.reload()
    assert library.problems == ()
    return library.rule_set


RULES = shipped()
MATCHER = LineMatcher(RULES)


def matches(entry: dict[str, Any], source: str) -> list[LineMatch]:
    return [MATCHER.match(line) for line in lines(entry["text"], source)]


@pytest.mark.parametrize("entry", CORPUS, ids=[entry["id"] for entry in CORPUS])
def test_one_rule_or_none_takes_each_line(entry: dict[str, Any]) -> None:
    """Tried on all rules of its source; with its role, its cause and its fields where the corpus names them."""
    taken = [match for match in matches(entry, entry["source"]) if match.rule]
    names = {match.rule.name for match in taken if match.rule}
    assert names == (set() if entry["rule"] == "none" else {entry["rule"]})
    if taken:
        assert {str(match.role) for match in taken} == {entry["role"]}
        assert str(taken[0].cause) == entry.get("cause", taken[0].cause)
        fields = {name: str(value) for name, value in entry.get("fields", {}).items()}
        assert fields.items() <= {name: str(value) for name, value in taken[0].fields.items()}.items()
    ended = {rule.name for match in matches(entry, entry["source"]) for rule, _ in match.ended}
    assert ended == set(entry.get("ends", ()))


@pytest.mark.parametrize("entry", CORPUS, ids=[entry["id"] for entry in CORPUS])
def test_a_line_means_nothing_else_where_another_source_prints_it(entry: dict[str, Any]) -> None:
    """What the kernel alone can say is nothing in a training's log, and the other way round."""
    for source in SOURCES:
        names = {match.rule.name for match in matches(entry, source) if match.rule}
        assert names <= {entry["rule"]}, source


def test_a_line_is_only_quiet_where_no_rule_of_any_source_can_take_it() -> None:
    """The one look in place of three finds all that the three would find; and most lines are quiet by it."""
    count = quiet = 0
    for entry in CORPUS:
        for line in lines(entry["text"], entry["source"]):
            is_quiet = MATCHER.is_quiet(line, SOURCES)
            found = [
                match for source in SOURCES if (match := MATCHER.match(line, source)) and (match.rule or match.ended)
            ]
            assert not (is_quiet and found), entry["id"]
            count, quiet = count + 1, quiet + is_quiet
    assert 0 < quiet < count


@pytest.mark.parametrize("rule", RULES.rules, ids=[rule.name for rule in RULES.rules])
def test_each_rule_has_two_lines_and_two_that_are_like_them(rule: Any) -> None:
    """A rule without reviewed examples does not ship."""
    positive = [entry for entry in CORPUS if entry["rule"] == rule.name]
    negative = [entry for entry in CORPUS if rule.name in entry.get("not", ())]
    assert len(positive) >= 2
    assert len(negative) >= 2
    assert all(entry["rule"] != rule.name for entry in negative)
    assert rule.summary


def test_only_what_the_kernel_says_can_be_about_a_node() -> None:
    """Of all shipped rules."""
    for rule in RULES.rules:
        if rule.target != "job":
            assert KERNEL_SOURCES & set(rule.sources), rule.name


def test_the_corpus_names_no_rule_that_is_not_there() -> None:
    """A line of a rule that was renamed would be tried on nothing."""
    named = {entry["rule"] for entry in CORPUS} | {name for entry in CORPUS for name in entry.get("not", ())}
    assert named - {"none"} <= RULES.by_name.keys()
    assert max(Counter(entry["id"] for entry in CORPUS).values()) == 1
