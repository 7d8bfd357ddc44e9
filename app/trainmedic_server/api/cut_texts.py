"""Cutting and marking of annotations that are over the server's limits.

Annotations are for people. A cut one loses its end, and a refused one would lose its alert. Labels are never cut: they
say what an alert is about, and a cut one could be about something else.

Caller: ``payload``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

MOST_TEXTS = 1_000
TEXT_LENGTH = 65_536
TOTAL_LENGTH = 131_072
"""Characters of all names and values together."""
MARK_NAME = "trainmedic_cut"
"""Name of the annotation that states how many annotations there were."""

_NAMES_LENGTH = TOTAL_LENGTH // 2
_NOT_STORED = re.compile("[\0\ud800-\udfff]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def first_texts(texts: Mapping[str, str]) -> Mapping[str, str]:
    """Return the texts. Of more than `MOST_TEXTS`, return the first ones, and one that counts the others."""
    if len(texts) <= MOST_TEXTS:
        return texts
    kept = MOST_TEXTS - 1
    mark = f"[cut: only {kept:,} of {len(texts):,} annotations are kept]"
    return {**dict(islice(texts.items(), kept)), MARK_NAME: mark}


def fitted(texts: Mapping[str, str]) -> Mapping[str, str]:
    """Return the texts with unstorable characters replaced, and with the longest cut until all limits hold.

    The same texts always give the same result. At most `MOST_TEXTS` are expected.
    """
    joined = "".join(chain.from_iterable(texts.items()))
    if len(joined) <= TEXT_LENGTH and not holds_unstored(joined):
        return texts
    longest_name = _ceiling([len(name) for name in texts], _NAMES_LENGTH)
    named = {cut(storable(name), longest_name): storable(text) for name, text in texts.items()}
    room = TOTAL_LENGTH - sum(map(len, named))
    longest = _ceiling([len(text) for text in named.values()], room)
    return {name: cut(text, longest) for name, text in named.items()}


def cut(text: str, length: int = TEXT_LENGTH) -> str:
    """Return at most `length` characters of the text. If it is cut, a mark at its end states its full length."""
    if len(text) <= length:
        return text
    mark = f"… [cut: {len(text):,} characters]"
    return text[: max(length - len(mark), 0)] + mark


def storable(text: str) -> str:
    """Return the text with NUL and half surrogate pairs, which no database stores, replaced by U+FFFD."""
    return _NOT_STORED.sub(_REPLACEMENT, text) if holds_unstored(text) else text


def holds_unstored(text: str) -> bool:
    """Return whether the text holds a character that no database stores."""
    return "\0" in text or (not text.isascii() and _NOT_STORED.search(text) is not None)


def _ceiling(lengths: Sequence[int], room: int) -> int:
    """Return the greatest length, up to `TEXT_LENGTH`, at which all texts fit into `room` if longer ones are cut."""
    remaining: Iterable[int] = sorted(min(length, TEXT_LENGTH) for length in lengths)
    for index, length in enumerate(remaining):
        share = room // (len(lengths) - index)
        if length > share:
            return share
        room -= length
    return TEXT_LENGTH
