"""Matching of a line against a rule set: at most one rule takes it.

Only rules with a literal in the line try their patterns. General rules come last, noise rules first (also among general
ones), then by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core import errors
from trainmedic_core.expressions.evaluation import compile_expression
from trainmedic_core.expressions.number_conditions import MissingMember, number_condition
from trainmedic_core.expressions.regexes import Found, LiteralSet, SearchPattern
from trainmedic_core.expressions.sandbox import PlainFunction
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.domain.xids import xid
from trainmedic_logs.lines import exception_causes, message_causes, records, shown_source
from trainmedic_logs.lines.line import LONGEST, Line
from trainmedic_logs.lines.prefilter import Prefilter
from trainmedic_logs.lines.rule import LinePattern, LogRule, RuleSet

OWN_MARK = "trainmedic: "
"""Beginning of our own log messages, which no rule takes, to prevent loops."""
LONGEST_FIELD = 1024
"""Characters of a captured field."""


def _xid(code: Any) -> Mapping[str, Any]:
    found = xid(int(code))
    return {"code": found.code, "action": found.action, "meaning": found.meaning}


def _is_finite(value: Any) -> bool:
    return value is None or math.isfinite(float(value))


def _is_nan(value: Any) -> bool:
    return value is not None and math.isnan(float(value))


FUNCTIONS: Mapping[str, PlainFunction] = {
    "xid": PlainFunction(_xid),
    "is_finite": PlainFunction(_is_finite),
    "is_nan": PlainFunction(_is_nan),
}
"""Functions for `when` and templates."""


_Meaning = tuple[Role, CauseClass, dict[str, str]]  # with the match's fields


class LineMatch(Struct, frozen=True):
    rule: LogRule | None = None
    role: Role | None = None
    cause: CauseClass | None = None
    """Role and cause of the pattern, else of the rule."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Captured groups, or a record's members."""
    near: tuple[str, ...] = ()
    """Rules with a literal but no pattern in the line: the wording may have changed."""
    start: int = 0
    """Offset of the match in characters."""
    ended: tuple[tuple[LogRule, Mapping[str, str]], ...] = ()
    """Rules that the line ends, with the captured groups."""
    refused: tuple[str, ...] = ()
    """Record rules whose condition does not hold."""


_NO_MATCH = LineMatch()


class _CompiledRule:
    def __init__(self, rule: LogRule) -> None:
        """Raises ValueError or Malformed."""
        self.rule = rule
        self.patterns = [(SearchPattern(each.pattern), each) for each in rule.match]
        self.unless = [SearchPattern(pattern) for pattern in rule.unless]
        self.ends = [SearchPattern(pattern) for pattern in rule.ends]
        self.when = compile_expression(rule.when, f"when of {rule.name}") if rule.when else None
        # Fast path; None if the sandbox must decide.
        self._numbers_hold = number_condition(rule.when, "fields", FUNCTIONS) if rule.when and rule.record else None

    def matched(self, text: bytes) -> tuple[Found, LinePattern] | None:
        for pattern, written in self.patterns:
            match = pattern.search(text)
            if match is not None:
                return match, written
        return None

    def is_excepted(self, text: bytes) -> bool:
        return any(pattern.search(text) is not None for pattern in self.unless)

    def holds(self, fields: Mapping[str, Any], source: str) -> bool | None:
        """None if a member is missing or not comparable."""
        if self.when is None:
            return True
        try:
            by_numbers = self._numbers_hold(fields) if self._numbers_hold is not None else None
        except MissingMember:
            return None
        if by_numbers is not None:
            return by_numbers
        try:
            return self.when.holds({"fields": fields, "source": source, **FUNCTIONS})
        except errors.ExpressionError:
            return None


class _SourceRules:
    def __init__(self, rules: Iterable[_CompiledRule]) -> None:
        self.over_records: dict[str, list[_CompiledRule]] = {}
        by_literal: dict[str, list[_CompiledRule]] = {}
        for compiled in rules:
            if compiled.rule.record:
                self.over_records.setdefault(compiled.rule.record, []).append(compiled)
            for literal in compiled.rule.contains:
                by_literal.setdefault(literal, []).append(compiled)
        for of_event in self.over_records.values():
            of_event.sort(key=_precedence)
        self.literals = LiteralSet(tuple(by_literal))
        self._by_literal = list(by_literal.values())
        self._literals = tuple(by_literal)

    @cached_property
    def prefilter(self) -> Prefilter:
        return Prefilter(self._literals)

    def has_literal(self, text: bytes) -> bool:
        return bool(self.literals.present(text))

    def candidates(self, text: bytes) -> list[_CompiledRule]:
        present = self.literals.present(text)
        if not present:
            return []
        chosen = {id(compiled): compiled for position in present for compiled in self._by_literal[position]}
        return sorted(chosen.values(), key=_precedence)


def _precedence(compiled: _CompiledRule) -> tuple[bool, bool, str]:
    return (compiled.rule.is_general, compiled.rule.role is not Role.NOISE, compiled.rule.name)


class LineMatcher:
    """Matcher without state of earlier lines."""

    def __init__(self, rule_set: RuleSet) -> None:
        """Raises ValueError or Malformed for an invalid rule."""
        self._compiled = [_CompiledRule(rule) for rule in rule_set.rules]
        self._by_sources: dict[tuple[str, ...], _SourceRules] = {}

    def match(self, line: Line, source: str | None = None) -> LineMatch:
        source = line.origin.source if source is None else source
        rules, words = self._of_sources((source,)), _words_of(line)
        match = self._match_words(rules, words, source) if words else _NO_MATCH
        if line.record is None or match.rule is not None:
            return match
        return self._match_record(rules, source, line.record)

    def is_quiet(self, line: Line, sources: tuple[str, ...]) -> bool:
        """Return whether certainly no rule takes the line."""
        rules = self._of_sources(sources)
        if line.record is not None and str(line.record.get("event")) in rules.over_records:
            return False
        words = _words_of(line)
        return not words or not rules.has_literal(words.encode(errors="replace")[:LONGEST])

    def prefilter(self, sources: tuple[str, ...]) -> Prefilter:
        return self._of_sources(sources).prefilter

    def _match_words(self, rules: _SourceRules, words: str, source: str) -> LineMatch:
        if words.startswith(OWN_MARK):
            return _NO_MATCH
        text = words.encode(errors="replace")[:LONGEST]
        candidates = rules.candidates(text)
        if candidates and (without_source := shown_source.without_source(words)) != words:
            text = without_source.encode(errors="replace")[:LONGEST]
            candidates = rules.candidates(text)
        return self._match_text(candidates, text, source, words) if candidates else _NO_MATCH

    def _of_sources(self, sources: tuple[str, ...]) -> _SourceRules:
        rules = self._by_sources.get(sources)
        if rules is None:
            of_any = (compiled for compiled in self._compiled if not set(sources).isdisjoint(compiled.rule.sources))
            rules = self._by_sources[sources] = _SourceRules(of_any)
        return rules

    def _match_text(self, candidates: list[_CompiledRule], text: bytes, source: str, words: str) -> LineMatch:
        near: list[str] = []
        ended: list[tuple[LogRule, Mapping[str, str]]] = []
        taken, is_known = LineMatch(), False
        for compiled in candidates:
            over = _end_groups(compiled, text)
            if over is not None:
                ended.append((compiled.rule, over))
                continue
            if taken.rule is not None:
                continue  # the line is taken; only ends matter now
            match = compiled.matched(text)
            if match is None:
                near.append(compiled.rule.name)
                continue
            is_known = True
            if not compiled.is_excepted(text):
                taken = self._taken(compiled, *match, text, source, words)
        if is_known or ended:
            near = []  # a rule knows the wording, even if it excludes the line
        return replace(taken, near=tuple(near), ended=tuple(ended)) if near or ended else taken

    def _taken(
        self, compiled: _CompiledRule, found: Found, pattern: LinePattern, text: bytes, source: str, words: str
    ) -> LineMatch:
        fields = {name: value[:LONGEST_FIELD] for name, value in found.groups.items()}
        # A record rule's condition applies to records only.
        if not (compiled.rule.record or compiled.holds(fields, source)):
            return _NO_MATCH
        role, cause = pattern.role or compiled.rule.role, pattern.cause or compiled.rule.cause
        if compiled.rule.is_general and pattern.cause is None and pattern.role is None:
            role, cause, fields = _meaning_of_exception(role, cause, fields, words)
        elif cause is CauseClass.STORAGE and "\n" in words:
            # The traceback may show what is used up if the message does not.
            shown = shown_source.last_shown(words[:LONGEST])
            cause = message_causes.other_than_disk(words[-LONGEST_FIELD:], shown) or cause
        # A match that begins with a line feed belongs to the next line.
        begin = found.start + (text[found.start : found.start + 1] == b"\n")
        return LineMatch(compiled.rule, role, cause, fields, start=len(text[:begin].decode(errors="replace")))

    def _match_record(self, rules: _SourceRules, source: str, record: Mapping[str, Any]) -> LineMatch:
        refused: list[str] = []
        for compiled in rules.over_records.get(str(record.get("event")), ()):
            holds = compiled.holds(record, source)
            if holds:
                return LineMatch(compiled.rule, compiled.rule.role, compiled.rule.cause, record, refused=tuple(refused))
            if holds is not None:
                refused.append(compiled.rule.name)
        return LineMatch(refused=tuple(refused)) if refused else _NO_MATCH


def _words_of(line: Line) -> str:
    return records.words_of(line.record) if line.record is not None and not line.has_words else line.text


def _meaning_of_exception(role: Role, cause: CauseClass, fields: dict[str, str], words: str) -> _Meaning:
    name = fields.get("exception") or fields.get("alone", "")
    # A rule with another cause knows it already.
    if cause is not CauseClass.CODE or not name:
        return role, cause, fields
    words = words[:LONGEST]
    reading = exception_causes.read(name, _whole_message(name, fields.get("message", ""), words), words)
    if "thread" in fields:
        reading = exception_causes.read_in_thread(reading, words)
    if reading.is_consequence:
        return Role.CASCADE, CauseClass.UNKNOWN, fields
    if reading.is_proof:
        fields = {**fields, exception_causes.PROOF: "program"}
    if reading.stated_by:
        fields = {**fields, "exception": reading.stated_by}
    if reading.is_guess:
        fields = {**fields, exception_causes.GUESS: "class"}
    return role, reading.cause, fields


def _whole_message(name: str, message: str, text: str) -> str:
    # The pattern captured only the first line of the message.
    _, found, rest = text.rpartition(f"{name}: {message}")
    return f"{message}{rest[:LONGEST_FIELD]}" if found else message


def _end_groups(compiled: _CompiledRule, text: bytes) -> Mapping[str, str] | None:
    for pattern in compiled.ends:
        match = pattern.search(text)
        if match is not None:
            return match.groups
    return None
