# Flight recorder dump of one rank: parser and JSON form. The parser runs in a confined process (`files/dump_child`).
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from msgspec import Struct

from trainmedic_logs.diagnosis.flight_recorder import plain_pickle
from trainmedic_logs.domain.finding import RANK_LIMIT
from trainmedic_logs.errors import DumpError

MOST_BYTES = 64 * 1024 * 1024
"""2,000 entries with call stacks take about 5 MiB."""
MOST_ENTRIES = 200_000
MOST_GROUPS = 20_000
_MOST_RANKS = 200_000
MOST_MEMBERS = 1_000_000
"""Ranks in all groups: a small pickle can repeat a list 20,000 times."""
_DONE_KEPT = 32  # completed collectives per group
_LONGEST_TEXT = 200
_LARGEST = 2**63 - 1
_RANKS = re.compile(r"\d{1,7}")
_NUMBER = re.compile(r"-?[0-9]{1,19}")


class ProcessGroup(Struct, frozen=True):
    name: str
    description: str
    """``default_pg`` has all ranks."""
    ranks: tuple[int, ...] = ()
    """Ascending; empty if not stated."""


class Entry(Struct, frozen=True):
    """Collective called by one rank."""

    group: ProcessGroup
    number: int
    """Number in the group, the same for all members."""
    operation: str
    sizes: str
    """Input sizes: ``[[4096, 5120]]``."""
    is_done: bool
    is_started: bool
    """Its kernel runs."""
    created_ns: int
    """Nanoseconds since 1970, by the node's clock; 0 if unknown."""


class Dump(Struct, frozen=True):
    rank: int
    groups: tuple[ProcessGroup, ...]
    entries: tuple[Entry, ...]
    last_called: frozenset[int] | None
    """Numbers of the groups' last called collectives; None if not stated."""


class TakenGroup(TypedDict):
    name: str
    description: str
    ranks: list[int]


class Taken(TypedDict):
    """JSON form, returned by the confined process."""

    rank: int
    configured: int  # number of the first groups, which the dump itself lists
    groups: list[TakenGroup]
    entries: list[tuple[int, int, str, str, bool, bool, int]]  # index of the group, then the members of `Entry`
    last_called: list[int] | None


def read(raw: bytes, rank: int) -> Dump:
    """Parse a pickle or JSON file. Raises DumpError."""
    if len(raw) > MOST_BYTES:
        raise DumpError(f"it has {len(raw):,} bytes; at most {MOST_BYTES:,} are read")
    if raw.lstrip()[:1] != b"{":
        return from_plain(plain_pickle.load(raw), rank)
    try:
        return from_plain(json.loads(raw, parse_int=_bounded_int), rank)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DumpError(f"it is not JSON: {str(error)[:200] or type(error).__name__}") from error


def from_plain(value: Any, rank: int) -> Dump:
    """Validate a parsed dump. Raises DumpError."""
    if not isinstance(value, dict) or not isinstance(value.get("entries"), list):
        raise DumpError("it is not a flight recorder dump: it has no list of entries")
    listed, configured = value["entries"], value.get("pg_config")
    if len(listed) > MOST_ENTRIES:
        raise DumpError(f"it has {len(listed):,} entries; at most {MOST_ENTRIES:,} are read")
    groups = dict(_groups(configured)) if isinstance(configured, dict) else {}
    entries = tuple(entry for item in listed if (entry := _entry(item, groups)))
    if listed and not entries and not any(_is_point_to_point(item) for item in listed):
        raise DumpError("none of its entries is a flight recorder entry")
    return Dump(rank, tuple(groups.values()), tuple(_open_and_last_done(entries)), _last_called(value.get("pg_status")))


def to_plain(dump: Dump) -> Taken:
    groups = list(dict.fromkeys([*dump.groups, *(entry.group for entry in dump.entries)]))
    places = {group: place for place, group in enumerate(groups)}
    return {
        "rank": dump.rank,
        "configured": len(dump.groups),
        "groups": [
            {"name": group.name, "description": group.description, "ranks": list(group.ranks)} for group in groups
        ],
        "entries": [
            (places[e.group], e.number, e.operation, e.sizes, e.is_done, e.is_started, e.created_ns)
            for e in dump.entries
        ],
        "last_called": None if dump.last_called is None else sorted(dump.last_called),
    }


def from_taken(value: Taken) -> Dump:
    groups = [ProcessGroup(g["name"], g["description"], tuple(g["ranks"])) for g in value["groups"]]
    entries = tuple(
        Entry(groups[place], number, operation, sizes, is_done, is_started, created)
        for place, number, operation, sizes, is_done, is_started, created in value["entries"]
    )
    called = value["last_called"]
    return Dump(
        value["rank"], tuple(groups[: value["configured"]]), entries, None if called is None else frozenset(called)
    )


def _groups(configured: Mapping[Any, Any]) -> Iterable[tuple[str, ProcessGroup]]:
    if len(configured) > MOST_GROUPS:
        raise DumpError(f"it has {len(configured):,} process groups; at most {MOST_GROUPS:,} are read")
    left = MOST_MEMBERS
    for key, group in configured.items():
        if isinstance(key, str) and isinstance(group, dict):
            name, members = _text(key), _members(group.get("ranks"))
            left -= len(members)
            if left < 0:
                raise DumpError(f"its process groups have over {MOST_MEMBERS:,} ranks together, which is the limit")
            yield name, ProcessGroup(name, _text(group.get("desc")), members)


def _members(ranks: Any) -> tuple[int, ...]:
    listed: Iterable[int | None] = ()
    if isinstance(ranks, str) and len(ranks) <= 8 * _MOST_RANKS:
        listed = map(int, _RANKS.findall(ranks))
    elif isinstance(ranks, list | tuple) and len(ranks) <= _MOST_RANKS:
        listed = map(_number, ranks)
    return tuple(sorted({rank for rank in listed if rank is not None and 0 <= rank < RANK_LIMIT}))


def _entry(item: Any, groups: Mapping[str, ProcessGroup]) -> Entry | None:
    if not isinstance(item, dict) or item.get("is_p2p"):
        return None
    number, named = _number(item.get("collective_seq_id")), item.get("process_group")
    if number is None or number < 0 or not isinstance(named, list | tuple) or not named:
        return None
    name = _text(named[0])
    description = _text(named[1]) if len(named) > 1 else ""
    group = groups.get(name) or ProcessGroup(name, description)
    # Gloo keeps the state and marks completion with "retired".
    is_done = item.get("state") == "completed" or item.get("retired") is True
    operation, sizes = _text(item.get("profiling_name")), _sizes(item.get("input_sizes"))
    created = max(_number(item.get("time_created_ns")) or 0, 0)
    return Entry(group, number, operation, sizes, is_done, item.get("state") == "started", created)


def _open_and_last_done(entries: Iterable[Entry]) -> Iterable[Entry]:
    by_group: dict[ProcessGroup, dict[int, Entry]] = {}
    for entry in entries:
        # Parts of a coalesced collective have its number, stay "scheduled", and come before it.
        by_group.setdefault(entry.group, {})[entry.number] = entry
    for by_number in by_group.values():
        yield from (entry for entry in by_number.values() if not entry.is_done)
        done = (entry for entry in by_number.values() if entry.is_done)
        yield from sorted(done, key=lambda entry: entry.number)[-_DONE_KEPT:]


def _is_point_to_point(item: Any) -> bool:
    return isinstance(item, dict) and item.get("is_p2p") is True


def _last_called(status: Any) -> frozenset[int] | None:
    if not isinstance(status, dict) or len(status) > MOST_GROUPS:
        return None
    called = (_number(of.get("last_enqueued_collective")) for of in status.values() if isinstance(of, dict))
    return frozenset(number for number in called if number is not None and number >= -1)  # -1: none yet


def _sizes(value: Any) -> str:
    if not isinstance(value, list | tuple) or len(value) > 16:
        return ""
    shapes = [shape if isinstance(shape, list | tuple) and len(shape) <= 16 else () for shape in value]
    return str([[_number(extent) for extent in shape] for shape in shapes])[:_LONGEST_TEXT]


def _text(value: Any) -> str:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else ""


def _number(value: Any) -> int | None:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and -_LARGEST <= value <= _LARGEST else None


def _bounded_int(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("a number of more than 20 digits")
    return int(digits)
