"""Matching of a line against a rule set: at most one rule takes it.

Only rules with a literal in the line try their patterns. Precedence: noise rules, other rules, general rules; then by
name.
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
"""No rule takes these notices, to prevent loops."""
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


_Meaning = tuple[Role, CauseClass, dict[str, str]]


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
    """Offset in characters."""
    ended: tuple[tuple[LogRule, Mapping[str, str]], ...] = ()
    """Rules that the line ends, with the captured groups."""
    refused: tuple[str, ...] = ()


_NOTHING = LineMatch()


class _ReadyRule:
    def __init__(self, rule: LogRule) -> None:
        """Raises ValueError or Malformed."""
        self.rule = rule
        self.patterns = [(SearchPattern(each.pattern), each) for each in rule.match]
        self.unless = [SearchPattern(pattern) for pattern in rule.unless]
        self.ends = [SearchPattern(pattern) for pattern in rule.ends]
        self.when = compile_expression(rule.when, f"when of {rule.name}") if rule.when else None
        self._of_numbers = number_condition(rule.when, "fields", FUNCTIONS) if rule.when and rule.record else None

    def matched(self, text: bytes) -> tuple[Found, LinePattern] | None:
        for pattern, written in self.patterns:
            match = pattern.search(text)
            if match is not None:
                return match, written
        return None

    def is_excepted(self, text: bytes) -> bool:
        return any(pattern.search(text) is not None for pattern in self.unless)

    def holds(self, fields: Mapping[str, Any], source: str) -> bool | None:
        """Return whether the condition holds; None without numbers."""
        if self.when is None:
            return True
        try:
            told = self._of_numbers(fields) if self._of_numbers is not None else None
        except MissingMember:
            return None
        if told is not None:
            return told
        try:
            return self.when.holds({"fields": fields, "source": source, **FUNCTIONS})
        except errors.ExpressionError:
            return None


class _SourceRules:
    def __init__(self, rules: Iterable[_ReadyRule]) -> None:
        self.over_records: dict[str, list[_ReadyRule]] = {}
        by_literal: dict[str, list[_ReadyRule]] = {}
        for ready in rules:
            if ready.rule.record:
                self.over_records.setdefault(ready.rule.record, []).append(ready)
            for literal in ready.rule.contains:
                by_literal.setdefault(literal, []).append(ready)
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

    def candidates(self, text: bytes) -> list[_ReadyRule]:
        present = self.literals.present(text)
        if not present:
            return []
        chosen = {id(ready): ready for position in present for ready in self._by_literal[position]}
        return sorted(chosen.values(), key=_precedence)


def _precedence(ready: _ReadyRule) -> tuple[bool, bool, str]:
    return (ready.rule.is_general, ready.rule.role is not Role.NOISE, ready.rule.name)


class LineMatcher:
    """Stateless."""

    def __init__(self, rule_set: RuleSet) -> None:
        """Raises ValueError or Malformed for an invalid rule."""
        self._ready = [_ReadyRule(rule) for rule in rule_set.rules]
        self._of: dict[tuple[str, ...], _SourceRules] = {}

    def match(self, line: Line, source: str | None = None) -> LineMatch:
        source = line.origin.source if source is None else source
        rules = self._of_sources((source,))
        words = records.words_of(line.record) if line.record is not None and not line.has_words else line.text
        match = self._match_words(rules, words, source) if words else _NOTHING
        if line.record is None or match.rule is not None:
            return match
        return self._match_record(rules, source, line.record)

    def is_quiet(self, line: Line, sources: tuple[str, ...]) -> bool:
        rules = self._of_sources(sources)
        if line.record is not None and str(line.record.get("event")) in rules.over_records:
            return False
        words = records.words_of(line.record) if line.record is not None and not line.has_words else line.text
        return not words or not rules.has_literal(words.encode(errors="replace")[:LONGEST])

    def prefilter(self, sources: tuple[str, ...]) -> Prefilter:
        return self._of_sources(sources).prefilter

    def _match_words(self, rules: _SourceRules, words: str, source: str) -> LineMatch:
        if words.startswith(OWN_MARK):
            return _NOTHING
        text = words.encode(errors="replace")[:LONGEST]
        candidates = rules.candidates(text)
        if candidates and (said := shown_source.without_source(words)) != words:
            text = said.encode(errors="replace")[:LONGEST]
            candidates = rules.candidates(text)
        return self._match_text(candidates, text, source, words) if candidates else _NOTHING

    def _of_sources(self, sources: tuple[str, ...]) -> _SourceRules:
        rules = self._of.get(sources)
        if rules is None:
            of_any = (ready for ready in self._ready if not set(sources).isdisjoint(ready.rule.sources))
            rules = self._of[sources] = _SourceRules(of_any)
        return rules

    def _match_text(self, candidates: list[_ReadyRule], text: bytes, source: str, words: str) -> LineMatch:
        near, ended, taken, is_known = [], [], LineMatch(), False
        for ready in candidates:
            over = _ended(ready, text)
            if over is not None:
                ended.append((ready.rule, over))
                continue
            if taken.rule is not None:
                continue  # the line is taken; only ends matter now
            match = ready.matched(text)
            if match is None:
                near.append(ready.rule.name)
                continue
            is_known = True
            if not ready.is_excepted(text):
                taken = self._taken(ready, *match, text, source, words)
        if is_known or ended:
            near = []  # a rule knows the wording, even if it excludes the line
        return replace(taken, near=tuple(near), ended=tuple(ended)) if near or ended else taken

    def _taken(
        self, ready: _ReadyRule, found: Found, pattern: LinePattern, text: bytes, source: str, words: str
    ) -> LineMatch:
        fields = {name: value[:LONGEST_FIELD] for name, value in found.groups.items()}
        # A record rule's condition applies to records only.
        if not (ready.rule.record or ready.holds(fields, source)):
            return _NOTHING
        role, cause = pattern.role or ready.rule.role, pattern.cause or ready.rule.cause
        if ready.rule.is_general and pattern.cause is None and pattern.role is None:
            role, cause, fields = _of_exception(role, cause, fields, words)
        elif cause is CauseClass.STORAGE and "\n" in words:
            # The traceback may show what is used up if the message does not.
            shown = shown_source.last_shown(words[:LONGEST])
            cause = message_causes.other_than_disk(words[-LONGEST_FIELD:], shown) or cause
        # A match that begins with a line feed belongs to the next line.
        begin = found.start + (text[found.start : found.start + 1] == b"\n")
        return LineMatch(ready.rule, role, cause, fields, start=len(text[:begin].decode(errors="replace")))

    def _match_record(self, rules: _SourceRules, source: str, record: Mapping[str, Any]) -> LineMatch:
        refused: list[str] = []
        for ready in rules.over_records.get(str(record.get("event")), ()):
            holds = ready.holds(record, source)
            if holds:
                return LineMatch(ready.rule, ready.rule.role, ready.rule.cause, record, refused=tuple(refused))
            if holds is not None:
                refused.append(ready.rule.name)
        return LineMatch(refused=tuple(refused)) if refused else _NOTHING


def _of_exception(role: Role, cause: CauseClass, fields: dict[str, str], words: str) -> _Meaning:
    name = fields.get("exception") or fields.get("alone", "")
    if cause is not CauseClass.CODE or not name:
        return role, cause, fields
    words = words[:LONGEST]
    reading = exception_causes.read(name, _whole_message(name, fields.get("message", ""), words), words)
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
    _, found, rest = text.rpartition(f"{name}: {message}")
    return f"{message}{rest[:LONGEST_FIELD]}" if found else message


def _ended(ready: _ReadyRule, text: bytes) -> Mapping[str, str] | None:
    for pattern in ready.ends:
        match = pattern.search(text)
        if match is not None:
            return match.groups
    return None
