"""The subset of PromQL needed to find a rule's comparison and to quote text."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

LONGEST_QUERY = 16_384  # characters
MOST_LABELS = 64  # by which a query is narrowed

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<text>"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' | `[^`]*`)
    | (?P<open>[(\[{]) | (?P<close>[)\]}])
    | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
    | (?P<number>0[xX][0-9a-fA-F]+ | (?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)? [A-Za-z]*)
    | (?P<compare>==|!=|>=|<=|=~|!~|>|<)
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_SET_OPERATORS: Final = frozenset({"and", "or", "unless"})
_MODIFIERS: Final = frozenset({"on", "ignoring", "group_left", "group_right", "bool"})
_MIRRORED: Final = {">": "<", "<": ">", ">=": "<=", "<=": ">=", "==": "==", "!=": "!="}
_LABEL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NOT_A_NUMBER: Final = "is not a number"  # operator for x != x, which holds only for NaN


class Comparison(Struct, frozen=True):
    """Condition of a rule. The limit is None if it is no number."""

    query: str  # the side that is compared
    operator: str  # as if the query were on the left; or `NOT_A_NUMBER`
    limit: float | None

    @property
    def better(self) -> str | None:
        """Direction of improvement: ``lower`` or ``higher``, None if the operator has none."""
        return {">": "lower", ">=": "lower", "<": "higher", "<=": "higher"}.get(self.operator)

    def holds(self, value: float) -> bool | None:
        """Return whether the condition holds for this value; None if unknown."""
        if self.operator == NOT_A_NUMBER:
            return math.isnan(value)
        if self.limit is None or math.isnan(value):
            return None
        return {
            ">": value > self.limit,
            ">=": value >= self.limit,
            "<": value < self.limit,
            "<=": value <= self.limit,
            "==": value == self.limit,
            "!=": value != self.limit,
        }[self.operator]


class _Token(Struct, frozen=True):
    kind: str
    text: str
    begin: int
    depth: int
    """Bracket nesting. A bracket has the depth outside of it."""

    @property
    def end(self) -> int:
        return self.begin + len(self.text)


def quoted(text: str) -> str:
    return f'"{escaped(text)}"'


def escaped(text: str) -> str:
    return "".join(character if _needs_no_escape(character) else _escape(character) for character in text)


def _needs_no_escape(character: str) -> bool:
    return character.isprintable() and character not in "\\\"'`\ufffd"  # Prometheus refuses an unescaped U+FFFD


def _escape(character: str) -> str:
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:  # a lone surrogate, which Prometheus refuses
        return "\\ufffd"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def narrowed(query: str, labels: Mapping[str, str]) -> str:
    """Return `query` limited to series that agree with `labels` on all shared labels. Labels that the series lack have
    no effect.
    """
    pairs = [(name, value) for name, value in sorted(labels.items()) if value and _LABEL_NAME.fullmatch(name)]
    clauses = [
        # An unescaped `$` would refer to a group of the regular expression.
        f"and on ({name}) (label_replace(vector(1), {quoted(name)}, {quoted(value.replace('$', '$$'))}, "
        '"", "") or vector(1))'
        for name, value in pairs[:MOST_LABELS]
        if not name.startswith("__")
    ]
    return " ".join([f"({query})", *clauses])


def is_within_quotes(text: str) -> bool:
    """Return whether the query prefix `text` ends within a string that can take `escaped` text."""
    quote = None
    position = 0
    while position < len(text):
        character = text[position]
        if quote is None:
            if character == "#":
                position = text.find("\n", position)
                if position < 0:
                    return False
            quote = character if character in "\"'`" else None
        elif character == "\\" and quote != "`":
            position += 1
        elif character == quote:
            quote = None
        position += 1
    return quote in ('"', "'")


def gives_bool(query: str) -> bool:
    """Return whether a comparison has ``bool``, so that its value is 0 or 1."""
    return any(token.kind == "name" and token.text.lower() == "bool" for token in _tokens(query))


def comparisons(expression: str) -> list[Comparison]:
    """Return the comparison of each ``or`` branch, in order; of ``and`` and ``unless``, the left side's."""
    found = [_comparison(branch) for branch in _branches(expression)]
    return [comparison for comparison in found if comparison is not None]


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    depth = 0
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        if kind == "close":
            depth -= 1
        if kind != "space":
            tokens.append(_Token(kind, match.group(), match.start(), depth))
        if kind == "open":
            depth += 1
    return tokens


def _bare(text: str) -> str:
    while tokens := _tokens(text):
        first, last = tokens[0], tokens[-1]
        text = text[first.begin : last.end]
        if first.text != "(" or last.text != ")" or any(token.depth == 0 for token in tokens[1:-1]):
            return text
        text = text[1:-1]
    return ""


def _branches(expression: str) -> Iterator[str]:
    """Yield the operands of ``or``, else the whole expression."""
    text = _bare(expression)
    begin = 0
    tokens = _tokens(text)
    for place, token in enumerate(tokens):
        if token.depth == 0 and token.kind == "name" and token.text.lower() == "or":
            yield from _branches(text[begin : token.begin])
            begin = _after_modifiers(tokens, place)
    if begin:
        yield from _branches(text[begin:])
    elif text:
        yield text


def _comparison(branch: str) -> Comparison | None:
    tokens = _tokens(branch)
    for token in tokens:
        if token.depth == 0 and token.kind == "name" and token.text.lower() in _SET_OPERATORS:
            of_left = comparisons(branch[: token.begin])
            return of_left[0] if of_left else None
    places = [place for place, token in enumerate(tokens) if token.depth == 0 and token.text in _MIRRORED]
    if len(places) != 1:
        return None
    operator = tokens[places[0]]
    left, right = _bare(branch[: operator.begin]), _bare(branch[_after_modifiers(tokens, places[0]) :])
    if not left or not right:
        return None
    if operator.text == "!=" and left.split() == right.split():
        return Comparison(left, NOT_A_NUMBER, None)
    if (limit := _number(left)) is not None:
        return Comparison(right, _MIRRORED[operator.text], limit)
    return Comparison(left, operator.text, _number(right))


def _after_modifiers(tokens: list[_Token], place: int) -> int:
    """Return the text position after the operator at token `place` and its modifiers."""
    end = tokens[place].end
    for token, following in itertools.pairwise([*tokens[place + 1 :], _Token("end", "", 0, 0)]):
        if token.begin < end:
            continue
        if token.text.lower() not in _MODIFIERS:
            break
        end = token.end
        if following.text == "(" and token.text.lower() != "bool":
            is_close = (each for each in tokens if each.begin > following.begin and each.kind == "close")
            end = next((each.end for each in is_close if each.depth == following.depth), end)
    return end


def _number(text: str) -> float | None:
    digits = text.replace(" ", "")
    try:
        return float.fromhex(digits) if "0x" in digits.lower() else float(digits)
    except ValueError:
        return None
