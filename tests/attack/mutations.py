"""Changes that somebody could make to a message, drawn at random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

STRANGE = [
    *(b"", b"{}", b"[]", b"null", b"NaN", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", rb"\ud800", rb"\u0000", b"1e999"),
    *(
        b"9" * 5000,
        b"[" * 300 + b"]" * 300,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b"[" * 20_000,
        b'"' * 500,
        b'\\"' * 500,
    ),
    *(b"true", b"-1", b"0", b'"applied"', b'"job":"llm-2"', b'"signature":""', b" " * 3000, "\u202e\x1b[2J".encode()),
]


def flip(raw: bytes, source: random.Random) -> bytes:
    at = source.randrange(len(raw)) if raw else 0
    return raw[:at] + bytes([source.randrange(256)]) + raw[at + 1 :]


def cut(raw: bytes, source: random.Random) -> bytes:
    first, last = sorted(source.randrange(len(raw) + 1) for _ in range(2))
    return raw[:first] + raw[last:]


def insert(raw: bytes, source: random.Random) -> bytes:
    at = source.randrange(len(raw) + 1)
    return raw[:at] + source.choice(STRANGE) + raw[at:]


def repeat(raw: bytes, source: random.Random) -> bytes:
    first, last = sorted(source.randrange(len(raw) + 1) for _ in range(2))
    return raw[:last] + raw[first:]


def change_member(raw: bytes, source: random.Random) -> bytes:
    """Another value for a member of the object, or another member."""
    try:
        fields = json.loads(raw)
        name = source.choice([*fields, "job", "node", "genuine", "ranks", "placement", "output", "status", "rank"])
        if source.random() < 0.2:
            fields.pop(name, None)
        else:
            strange = [None, True, -1, 10**40, 1e308, "", "llm-2", [], {}, [[[]]] * 3, {"a": {"b": []}}, "\ud800", "\0"]
            fields[name] = source.choice(strange)
        return json.dumps(fields).encode()
    except (ValueError, TypeError, RecursionError):
        return flip(raw, source)


def respell(raw: bytes, source: random.Random) -> bytes:
    """The same object, written in another way: what is signed are bytes."""
    try:
        fields = json.loads(raw)
        return json.dumps(fields, indent=source.choice([None, 1]), sort_keys=source.random() < 0.5).encode()
    except (ValueError, RecursionError):
        return raw


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [flip, cut, insert, repeat, change_member, respell]


def mutated(raw: bytes, source: random.Random) -> bytes:
    """`raw` after one to four changes; now and then as it is."""
    for _ in range(source.randrange(5)):
        raw = source.choice(MUTATIONS)(raw, source)
    return raw
