"""JSON documents with members and bytes that nobody expects, made of good ones."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 1 << 70, 1e308, "", "\x00", "\ud800", "x" * 70_000, [], {}, [[]], [{}], {"": ""}),
    *("0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999999+23:59", "2026-02-30T00:00:00Z", "{{ 7 * 7 }}", "\u202e"),
)
ODD_BYTES = (
    b"\\ud800",
    b"\xff",
    b"\x00",
    b"[" * 300,
    b"{",
    b'"',
    b"\\",
    b"NaN",
    b"1e999",
    b",",
    b"\xef\xbb\xbf",
    b"9" * 5000,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a document."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, member in members for place in ((value, key), *places(member))]


def mutated(source: random.Random, document: dict[str, Any]) -> bytes:
    """The document with some members replaced, removed or added, and some bytes changed."""
    document = json.loads(json.dumps(document))
    for _ in range(source.randrange(4)):
        if not (options := places(document)):
            break
        container, key = source.choice(options)
        match source.randrange(3):
            case 0:
                container[key] = copy.deepcopy(source.choice(ODD_VALUES))
            case 1:
                del container[key]
            case _ if isinstance(container, dict):
                container[source.choice(("", "\x00", "\u2028", "alerts", "x" * 300))] = copy.deepcopy(
                    source.choice(ODD_VALUES)
                )
            case _:
                container.append(copy.deepcopy(source.choice(ODD_VALUES)))
    body = bytearray(json.dumps(document).encode())
    for _ in range(source.choice((0, 0, 0, 1, 1, 3))):
        begin = source.randrange(len(body) + 1)
        end = min(len(body), begin + source.randrange(20))
        match source.randrange(4):
            case 0:
                body[begin:end] = source.choice(ODD_BYTES)
            case 1:
                body[begin:begin] = body[begin:end] * source.randrange(1, 50)
            case 2:
                body = body[:begin]
            case _:
                body[begin:end] = source.randbytes(end - begin)
    return bytes(body)
