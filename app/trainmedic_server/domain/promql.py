"""The subset of PromQL needed to find a rule's comparison and to quote text."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from msgspec import Struct

LONGEST_QUERY = 16_384  # characters
MOST_LABELS = 64  # by which a query is narrowed

_TOKEN = re.compile(  # An unterminated text is one token too: else the search for its end would be repeated.
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<text>"(?:[^"\\\n]|\\.)*+"? | '(?:[^'\\\n]|\\.)*+'? | `[^`]*`?)
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


# A query is read in pieces, between its templates, which must be inside quotes (`catalog/quoted_query`).
class QuoteScan:
    def __init__(self) -> None:
        self._inside = ""  # the open quote, or "#" within a comment
        self._is_escaped = False  # the next character

    def read(self, text: str) -> bool:
        """Return whether the query so far ends within a string that can take `escaped` text."""
        for character in text:
            if self._is_escaped:
                self._is_escaped = False
            elif not self._inside:
                self._inside = character if character in "\"'`#" else ""
            elif character == "\\" and self._inside in "\"'":
                self._is_escaped = True
            elif character == ("\n" if self._inside == "#" else self._inside):
                self._inside = ""
        return self._inside in ('"', "'")


def gives_bool(query: str) -> bool:
    """Return whether a comparison has ``bool``, so that its value is 0 or 1."""
    return any(token.kind == "name" and token.text.lower() == "bool" for token in _tokens(query))


def comparisons(expression: str) -> list[Comparison]:
    """Return the comparison of each ``or`` branch, in order; of ``and`` and ``unless``, the left side's."""
    text = _Text(expression)
    found: list[Comparison] = []
    # A group is the outermost left side of an ``and`` or ``unless``, with all ``or`` branches in it. Only its first
    # comparison counts.
    waiting: list[tuple[_Part, object]] = [(text.whole, None)]
    served: object = None  # the last group with a comparison
    while waiting:
        part, group = waiting.pop()
        if group is not None and group is served:
            continue
        part = text.bare(part)
        operands = text.operands(part)
        if len(operands) > 1:
            waiting.extend((operand, group) for operand in reversed(operands))
        elif (left := text.left_of_set(part)) is not None:
            waiting.append((left, group or object()))
        elif (comparison := text.comparison(part)) is not None:
            found.append(comparison)
            served = group
    return found


class _Part(Struct, frozen=True):
    begin: int  # first token
    end: int  # token after the last
    depth: int  # brackets around it


class _Text:
    # Its methods skip what is in brackets within a part.

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._closing: dict[int, int] = {}  # by opening bracket
        opened: dict[int, int] = {}  # the last opening bracket of each depth
        for place, token in enumerate(self._tokens):
            if token.kind == "open":
                opened[token.depth] = place
            elif token.kind == "close" and (opening := opened.pop(token.depth, None)) is not None:
                self._closing[opening] = place

    @property
    def whole(self) -> _Part:
        return _Part(0, len(self._tokens), 0)

    def bare(self, part: _Part) -> _Part:
        begin, end, depth = part.begin, part.end, part.depth
        while (
            end - begin >= 2
            and self._tokens[begin].text == "("
            and self._tokens[end - 1].text == ")"
            and self._closing.get(begin) == end - 1
        ):
            begin, end, depth = begin + 1, end - 1, depth + 1
        return _Part(begin, end, depth)

    def operands(self, part: _Part) -> list[_Part]:
        # Operands of ``or``, else the part itself.
        found, begin = [], part.begin
        for place in self._places(part):
            if self._is_named(place, ("or",)):
                found.append(_Part(begin, place, part.depth))
                begin = self._after_modifiers(place, part.end)
        return [*found, _Part(min(begin, part.end), part.end, part.depth)]

    def left_of_set(self, part: _Part) -> _Part | None:
        for place in self._places(part):
            if self._is_named(place, _SET_OPERATORS):
                return _Part(part.begin, place, part.depth)
        return None

    def comparison(self, part: _Part) -> Comparison | None:
        places = [place for place in self._places(part) if self._tokens[place].text in _MIRRORED]
        if len(places) != 1:
            return None
        operator = self._tokens[places[0]].text
        left = self._written(_Part(part.begin, places[0], part.depth))
        right = self._written(_Part(self._after_modifiers(places[0], part.end), part.end, part.depth))
        if not left or not right:
            return None
        if operator == "!=" and left.split() == right.split():
            return Comparison(left, NOT_A_NUMBER, None)
        if (limit := _number(left)) is not None:
            return Comparison(right, _MIRRORED[operator], limit)
        return Comparison(left, operator, _number(right))

    def _places(self, part: _Part) -> Iterator[int]:
        place = part.begin
        while place < part.end:
            token = self._tokens[place]
            if token.depth == part.depth:
                yield place
                if token.kind == "open":
                    place = self._closing.get(place, part.end)
                    continue
            place += 1

    def _is_named(self, place: int, names: Collection[str]) -> bool:
        token = self._tokens[place]
        return token.kind == "name" and token.text.lower() in names

    def _after_modifiers(self, place: int, end: int) -> int:
        place += 1  # the first token that is no modifier of the operator
        while place < end and (text := self._tokens[place].text.lower()) in _MODIFIERS:
            place += 1
            if text != "bool" and place < end and self._tokens[place].text == "(":
                place = self._closing.get(place, place - 1) + 1
        return place

    def _written(self, part: _Part) -> str:
        part = self.bare(part)
        if part.begin >= part.end:
            return ""
        return self._text[self._tokens[part.begin].begin : self._tokens[part.end - 1].end]


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


def _number(text: str) -> float | None:
    digits = text.replace(" ", "")
    try:
        return float.fromhex(digits) if "0x" in digits.lower() else float(digits)
    except (ValueError, OverflowError):
        return None
