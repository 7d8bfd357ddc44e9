from __future__ import annotations

import re

from trainmedic_core.expressions.regexes import literal_bytes

_ANY_CASE = "(?i)"
_ESCAPED = re.compile(r"\\(?:[^\w\s]|[dDsSwWbB])")
_MAY_BE_MISSING = re.compile(r".[*?]")
_NOT_UNDERSTOOD = re.compile(r"[\\()\[\]{}]")
_NOT_LITERAL = re.compile(r"[.^$+*?\x00-\x1f\x7f\ufffd\ud800-\udfff]")
# Letters with a non-ASCII variant.
_NON_ASCII_VARIANT = re.compile(r"[ksKS]|[^\x00-\x7f]")


def required_patterns(expression: str) -> list[bytes] | None:
    r"""Return patterns for ``ByteSearch``, of which every match contains one.

    None if unknown: groups, sets and counts are not understood.
    """
    any_case = expression.startswith(_ANY_CASE)
    simple = _ESCAPED.sub(".", expression.removeprefix(_ANY_CASE))
    if _NOT_UNDERSTOOD.search(simple):
        return None
    patterns = []
    for alternative in simple.split("|"):
        parts = _NOT_LITERAL.split(_MAY_BE_MISSING.sub(".", alternative))
        if any_case:
            parts = [piece for part in parts for piece in _NON_ASCII_VARIANT.split(part)]
        longest = max(parts, key=len)
        if not longest:
            return None
        patterns.append(b"(?i:%b)" % literal_bytes(longest) if any_case else literal_bytes(longest))
    return patterns
