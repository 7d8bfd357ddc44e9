"""Truncation of annotations that exceed the server's limits. Labels stay: a shorter one could mean something else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

MOST_TEXTS = 1_000  # annotations of an alert
TEXT_LENGTH = 65_536  # characters of a name or value
TOTAL_LENGTH = 131_072  # characters of all names and values
MARK_NAME = "trainmedic_cut"  # annotation that states how many were kept

_NAMES_LENGTH = TOTAL_LENGTH // 2  # of all names
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def first_texts(texts: Mapping[str, str]) -> Mapping[str, str]:
    """Drop surplus texts. The last one then states how many there were."""
    if len(texts) <= MOST_TEXTS:
        return texts
    kept = MOST_TEXTS - 1
    mark = f"[cut: only {kept:,} of {len(texts):,} annotations are kept]"
    return {**dict(islice(texts.items(), kept)), MARK_NAME: mark}


def fitted(texts: Mapping[str, str]) -> Mapping[str, str]:
    """Truncate the longest texts to the limits, and replace unstorable characters. Expects at most `MOST_TEXTS`."""
    joined = "".join(chain.from_iterable(texts.items()))
    if len(joined) <= TEXT_LENGTH and not has_unstorable(joined):
        return texts
    longest_name = _ceiling([len(name) for name in texts], _NAMES_LENGTH)
    named = {cut(storable(name), longest_name): storable(text) for name, text in texts.items()}
    room = TOTAL_LENGTH - sum(map(len, named))
    longest = _ceiling([len(text) for text in named.values()], room)
    return {name: cut(text, longest) for name, text in named.items()}


def cut(text: str, length: int = TEXT_LENGTH) -> str:
    if len(text) <= length:
        return text
    mark = f"… [cut: {len(text):,} characters]"
    return text[: max(length - len(mark), 0)] + mark


def storable(text: str) -> str:
    return _UNSTORABLE.sub(_REPLACEMENT, text) if has_unstorable(text) else text


def has_unstorable(text: str) -> bool:
    return "\0" in text or (not text.isascii() and _UNSTORABLE.search(text) is not None)


def _ceiling(lengths: Sequence[int], room: int) -> int:
    """Return the length to which texts are truncated to fit into `room`."""
    remaining: Iterable[int] = sorted(min(length, TEXT_LENGTH) for length in lengths)
    for index, length in enumerate(remaining):
        share = room // (len(lengths) - index)
        if length > share:
            return share
        room -= length
    return TEXT_LENGTH
