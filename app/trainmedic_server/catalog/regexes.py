"""Regular expressions as Alertmanager has them (RE2 syntax), on Python's `re`.

RE2 never backtracks; `re` does. Two bounds keep a pattern from taking the server down: a repetition
without end may not stand inside another one (``(a+)+``), and `matching` does not test values longer
than `LONGEST_VALUE`. What RE2 lacks (look-around, back-references, possessive repetition) is refused,
so a matcher that loads here loads in Alertmanager.
"""

from __future__ import annotations

import re

LONGEST_VALUE = 1024
"""Characters of a label's value that a regular expression is tried on."""
_LONGEST_PATTERN = 1000

_POSIX = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "digit": "0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "space": r"\t\n\v\f\r ",
    "punct": r"!-/:-@\[-`{-~",
    "word": r"0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
_SAME = frozenset(r"abBdDfnrstvwWS" + r".^$*+?()[]{}|\/-:;,=!<>@#%&~'`" + '"_ ')
_GROUP = re.compile(r"\(\?(?:P?<(?P<name>\w+)>|(?P<flags>[imsU]*(?:-[imsU]+)?)(?P<colon>[:)]))")
_REPEAT = re.compile(r"(?:[*+?]|\{(?P<least>\d+)(?P<comma>,(?P<most>\d*))?\})\??")


def translate(pattern: str) -> re.Pattern[str]:
    """Return the pattern, for `fullmatch`. Raises ValueError that says what is wrong."""
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"a regular expression has at most {_LONGEST_PATTERN} characters")
    translated = _Translation(pattern).run()
    try:
        return re.compile(translated, re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._out: list[str] = []
        # For each open group, and the whole: whether something in it repeats without end.
        self._endless = [False]
        self._last_endless = False

    def run(self) -> str:
        while self._at < len(self._pattern):
            self._next(self._pattern[self._at])
        return "".join(self._out)

    def _next(self, char: str) -> None:
        repeat = _REPEAT.match(self._pattern, self._at)
        if repeat:
            self._repeat(repeat)
        elif char == "(":
            self._open()
        elif char == ")":
            self._last_endless = self._endless.pop() if len(self._endless) > 1 else False
            self._endless[-1] |= self._last_endless
            self._take(")")
        elif char == "[":
            self._last_endless = False
            self._class()
        elif char == "\\":
            self._last_endless = False
            self._out.append(self._escape())
        else:
            self._last_endless = False
            self._take(char)

    def _take(self, text: str) -> None:
        self._out.append(text)
        self._at += len(text)

    def _repeat(self, repeat: re.Match[str]) -> None:
        text = repeat[0]
        most = repeat["most"] if repeat["comma"] else repeat["least"]
        if repeat["least"] and max(int(repeat["least"]), int(most or 0)) > 1000:
            raise ValueError(f"{text}: a repetition counts to 1000 at most")
        if self._pattern[repeat.end() : repeat.end() + 1] in ("*", "+"):
            raise ValueError(f"{self._pattern[repeat.start() : repeat.end() + 1]}: a repetition of a repetition")
        endless = text[0] in "*+" or (repeat["comma"] is not None and most == "")
        if self._last_endless and (endless or (most or "0") > "1"):
            raise ValueError(f"a repetition without end inside another one (before {text!r}) could take for ever")
        self._endless[-1] |= endless
        self._last_endless = False
        self._take(text)

    def _open(self) -> None:
        self._last_endless = False
        group = _GROUP.match(self._pattern, self._at)
        if self._pattern.startswith("(?", self._at) and group is None:
            raise ValueError(f"{self._pattern[self._at : self._at + 4]!r}: look-around and the like are not in RE2")
        if group is None:
            self._take("(")
        else:
            if "U" in (group["flags"] or ""):
                raise ValueError("the flag U is not supported")
            self._out.append(f"(?P<{group['name']}>" if group["name"] else group[0])
            self._at = group.end()
            if group["colon"] == ")":
                if group.start() > 0:
                    raise ValueError(f"{group[0]}: flags stand at the beginning, or in a group: (?i:…)")
                return
        self._endless.append(False)

    def _class(self) -> None:
        self._take("[")
        if self._pattern.startswith("^", self._at):
            self._take("^")
        if self._pattern.startswith("]", self._at):
            self._out.append("\\]")
            self._at += 1
        while self._at < len(self._pattern) and self._pattern[self._at] != "]":
            posix = re.compile(r"\[:(\^?)(\w+):\]").match(self._pattern, self._at)
            if posix:
                if posix[1] or posix[2] not in _POSIX:
                    raise ValueError(f"the class {posix[0]} is not supported")
                self._out.append(_POSIX[posix[2]])
                self._at = posix.end()
            elif self._pattern[self._at] == "\\":
                self._out.append(self._escape())
            else:
                # "[" and doubled marks mean nothing to RE2; Python warns that they may mean sets one day.
                char = self._pattern[self._at]
                self._out.append("\\" + char if char in "[&|~" else char)
                self._at += 1
        if self._at >= len(self._pattern):
            raise ValueError("a '[' is not closed")
        self._take("]")

    def _escape(self) -> str:
        rest = self._pattern[self._at + 1 :]
        if not rest:
            raise ValueError("a backslash stands at the end")
        if rest.startswith("Q"):
            text, _, _ = rest[1:].partition("\\E")
            self._at += 2 + len(text) + (2 if "\\E" in rest else 0)
            return re.escape(text)
        number = re.match(r"x(?:\{([0-9A-Fa-f]{1,6})\}|([0-9A-Fa-f]{2}))", rest)
        if number:
            self._at += 1 + number.end()
            code = int(number[1] or number[2], 16)
            if code > 0x10FFFF:
                raise ValueError(f"\\{number[0]} is no character")
            return re.escape(chr(code))
        if rest[0] in "Az":
            self._at += 2
            return "\\A" if rest[0] == "A" else "\\Z"
        if rest[0] not in _SAME:
            raise ValueError(f"the escape \\{rest[0]} is not supported")
        self._at += 2
        return "\\" + rest[0]
