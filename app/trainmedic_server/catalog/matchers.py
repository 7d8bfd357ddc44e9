"""Alertmanager's matchers, in the syntax of its UTF-8 mode: ``severity=~"warning|critical"``, ``team!=infra``.

A missing label has the empty value. Regular expressions match the whole value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from trainmedic_core.expressions.regexes import Pattern, ValueTooLong
from trainmedic_core.problems import shown

_LONGEST = 10_000
_RESERVED = r"{}!=~,\\\"'`\s"
_TOKEN = re.compile(
    rf"""\s*(?:
        (?P<operator>=~|!~|!=|=)
      | (?P<quoted>"(?:[^"\\\n]|\\.)*")
      | (?P<bare>[^{_RESERVED}]+)
      | (?P<mark>[{{}},])
    )""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


class Matcher(Struct, frozen=True):
    label: str
    operator: str
    value: str
    pattern: Pattern | None = None  # of =~ and !~

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Raises ValueTooLong."""
        value = labels.get(self.label, "")
        if self.pattern is None:
            return (value == self.value) is (self.operator == "=")
        try:
            return self.pattern.matches(value) is (self.operator == "=~")
        except ValueTooLong as error:
            raise ValueTooLong(f"label {self.label}: {error}") from None

    def refusal(self, labels: Mapping[str, str]) -> str:
        wish = "match" if self.pattern is not None else "be"
        wanted = self.value if self.pattern is not None else repr(self.value)
        no = " not" if self.operator.startswith("!") else ""
        return f"{self.label!r} is {shown(labels.get(self.label, ''))} and must{no} {wish} {wanted}"

    def __str__(self) -> str:
        value = self.value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'{self.label}{self.operator}"{value}"'


def parse(text: str) -> tuple[Matcher, ...]:
    """Read one matcher, or several separated by commas, with or without braces. Raises ValueError."""
    if len(text) > _LONGEST:
        raise ValueError(f"a matcher has at most {_LONGEST} characters")
    tokens = _tokens(text)
    if tokens and tokens[0] == ("mark", "{"):
        if tokens[-1] != ("mark", "}"):
            raise ValueError("the '{' is not closed")
        tokens = tokens[1:-1]
    matchers: list[Matcher] = []
    while tokens:
        if len(tokens) < 3 or tokens[1][0] != "operator" or "mark" in (tokens[0][0], tokens[2][0]):
            raise ValueError(_malformed(tokens))
        (_, label), (_, operator), (kind, value) = tokens[:3]
        if kind == "operator" or tokens[0][0] == "operator" or not label:
            raise ValueError(_malformed(tokens))
        matchers.append(Matcher(label, operator, value, Pattern(value) if operator in ("=~", "!~") else None))
        tokens = tokens[3:]
        if tokens and tokens[0] != ("mark", ","):
            raise ValueError(f"expected ',' or the end, not {shown(tokens[0][1])}")
        tokens = tokens[1:]
    if not matchers:
        raise ValueError('a matcher is a label, an operator (=, !=, =~, !~) and a value: severity="critical"')
    return tuple(matchers)


_LOOKS_LIKE_PATTERN = re.compile(r"[\w.-]+(\|[\w.-]+)+|.*\.[*+].*|\^.*|.*\w\*|\*")


def pattern_error(matcher: Matcher) -> str | None:
    """Return the error if a literal value looks like a pattern or template."""
    if matcher.pattern is not None:
        return None
    if "{{" in matcher.value:
        return f"{shown(matcher.value)} is compared as it is: a matcher has no template"
    if not _LOOKS_LIKE_PATTERN.fullmatch(matcher.value):
        return None
    pattern = matcher.value if ".*" in matcher.value else matcher.value.replace("*", ".*")
    sign = "=~" if matcher.operator == "=" else "!~"
    return f'{shown(matcher.value)} is compared as it is; write {matcher.label}{sign}"{pattern}"'


def _tokens(text: str) -> list[tuple[str, str]]:
    text = text.rstrip()
    at = 0
    tokens: list[tuple[str, str]] = []
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{shown(text[at:].lstrip()[:1])} is not allowed outside double quotes")
        kind = match.lastgroup or ""
        token = match[kind]
        tokens.append((kind, _unquoted(token) if kind == "quoted" else token))
        at = match.end()
    return tokens


def _unquoted(token: str) -> str:
    # Unknown escapes stay, so that "\d" reaches the regular expression (as in Alertmanager's classic mode).
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), token[1:-1])


def _malformed(tokens: list[tuple[str, str]]) -> str:
    written = ""
    for before, (kind, token) in zip([("operator", ""), *tokens], tokens[:4], strict=False):
        written += token if "operator" in (before[0], kind) else f" {token}"
    if [kind for kind, _ in tokens[:3]] == ["bare", "operator", "operator"]:
        return f'{shown(written)} is not a matcher; write one sign: {tokens[0][1]}="…"'
    if len(tokens) > 1 and tokens[0][0] == "bare" and tokens[1][0] == "operator" and len(tokens) == 2:
        return f'{shown(written)} has no value; write {tokens[0][1]}{tokens[1][1]}"" for an empty one'
    return f'{shown(written)} is not a matcher; write a label, =, !=, =~ or !~, and a value: severity="critical"'
