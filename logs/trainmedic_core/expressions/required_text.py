"""What must stand in every line in which a regular expression is found, so that most lines need no closer look."""

from __future__ import annotations

import re

from trainmedic_core.expressions.regexes import literal_bytes

_ANY_CASE = "(?i)"
_ESCAPED = re.compile(r"\\(?:[^\w\s]|[dDsSwWbB])")
_MAY_BE_MISSING = re.compile(r".[*?]")
_NOT_READ = re.compile(r"[\\()\[\]{}]")
_NOT_LITERAL = re.compile(r"[.^$+*?\x00-\x1f\x7f\ufffd\ud800-\udfff]")
_FOLDED = re.compile(r"[ksKS]|[^\x00-\x7f]")
"""Letters of which another case is no ASCII, and what is none."""


def required_patterns(expression: str) -> list[bytes] | None:
    """Patterns over bytes (``ByteSearch``), of which one is found in the UTF-8 of each text in which `expression` is.

    None where it cannot be said: this reads texts with ``.``, ``|``, ``*``, ``+``, ``?``, anchors and classes such as
    ``\\d``, also behind ``(?i)``; no groups, sets and counts.
    """
    any_case = expression.startswith(_ANY_CASE)
    simple = _ESCAPED.sub(".", expression.removeprefix(_ANY_CASE))
    if _NOT_READ.search(simple):
        return None
    patterns = []
    for alternative in simple.split("|"):
        parts = _NOT_LITERAL.split(_MAY_BE_MISSING.sub(".", alternative))
        if any_case:
            parts = [piece for part in parts for piece in _FOLDED.split(part)]
        longest = max(parts, key=len)
        if not longest:
            return None
        patterns.append(b"(?i:%b)" % literal_bytes(longest) if any_case else literal_bytes(longest))
    return patterns
