"""One-line digest of a dump, for transfer from a node to the server.

The lines of a node's ranks form the excerpt of one finding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from trainmedic_logs.diagnosis.flight_recorder.dump import MOST_MEMBERS, Dump, Entry, ProcessGroup
from trainmedic_logs.domain.finding_codec import RANK_LIMIT, read_ranks, write_ranks
from trainmedic_logs.errors import DumpError
from trainmedic_logs.lines.masks import masked

RULE = SOURCE = "flight-recorder"
"""Reserved: log rules and policies cannot use it."""
LONGEST = 24 * 1024
"""Characters of a line; ten fit into an excerpt."""
# Open and completed collectives per group; the second pair for too long lines.
_KEPT_COUNTS = ((16, 8), (4, 0))
_LARGEST = 2**63 - 1


def write(dump: Dump, attempt: int | None) -> str:
    """Raises DumpError if it is too long."""
    for under_way, done in _KEPT_COUNTS:
        line = _written(dump, attempt, under_way, done)
        if len(line) <= LONGEST:
            return line
    raise DumpError("it has too many groups or open collectives to be sent")


def write_refused(rank: int, attempt: int | None, why: str) -> str:
    return _line(rank=rank, attempt=attempt, refused=masked(why)[:300])


class SharedGroups:
    # The dumps of a job have most groups in common, and one of 100,000 ranks takes 4 MB.
    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, str], ProcessGroup] = {}
        self._left = 4 * MOST_MEMBERS

    def of(self, name: str, description: str, ranks: str, most: int) -> ProcessGroup:
        # Raises EnvelopeError.
        key = (name, description, ranks)
        if key not in self._groups:
            group = ProcessGroup(name, description, tuple(sorted(read_ranks(ranks, min(most, self._left)))))
            self._left -= len(group.ranks)
            self._groups[key] = group
        return self._groups[key]


def read(
    lines: Iterable[str], attempt: int | None, shared: SharedGroups | None = None
) -> tuple[list[Dump], dict[int, str]]:
    """Return dumps, and by rank why one was refused. Skips invalid lines and other attempts (None: any counts)."""
    dumps: list[Dump] = []
    refused: dict[int, str] = {}
    shared = shared or SharedGroups()
    for line in lines:
        try:
            fields = json.loads(line) if len(line) <= LONGEST else {}
            if attempt is not None and fields["attempt"] not in (attempt, None):
                continue
            if "refused" in fields:
                refused[_rank(fields)] = str(fields["refused"])[:300]
            else:
                dumps.append(_dump(fields, shared))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            continue
    return dumps, refused


def _written(dump: Dump, attempt: int | None, under_way: int, done: int) -> str:
    by_group: dict[ProcessGroup, list[Entry]] = {group: [] for group in dump.groups}
    for entry in dump.entries:
        by_group.setdefault(entry.group, []).append(entry)
    places = {group: place for place, group in enumerate(by_group)}
    kept = [entry for of_group in by_group.values() for entry in _kept(of_group, under_way, done)]
    operations = {name: place for place, name in enumerate(dict.fromkeys(entry.operation for entry in kept))}
    return _line(
        rank=dump.rank,
        attempt=attempt,
        configured=len(dump.groups),
        groups=[[masked(group.name), masked(group.description), write_ranks(group.ranks)] for group in by_group],
        operations=[masked(name) for name in operations],
        entries=[
            [places[e.group], e.number, operations[e.operation], int(e.is_done), int(e.is_started), e.created_ns]
            for e in kept
        ],
        called=None if dump.last_called is None else sorted(dump.last_called),
    )


def _kept(of_group: Sequence[Entry], under_way: int, done: int) -> list[Entry]:
    in_order = sorted(of_group, key=lambda entry: entry.number)
    finished, open_ones = [e for e in in_order if e.is_done], [e for e in in_order if not e.is_done]
    kept = [*finished[len(finished) - min(done, len(finished)) :], *open_ones[:under_way], *in_order[-1:]]
    return list(dict.fromkeys(kept))


def _line(**members: Any) -> str:
    return json.dumps(members, separators=(",", ":"))


def _dump(fields: dict[str, Any], shared: SharedGroups) -> Dump:
    groups: list[ProcessGroup] = []
    left = MOST_MEMBERS
    for name, description, ranks in fields["groups"]:
        groups.append(shared.of(str(name)[:200], str(description)[:200], ranks, left))
        left -= len(groups[-1].ranks)
        if left < 0:
            raise ValueError("too many members")
    operations = [str(operation)[:200] for operation in fields["operations"]]
    entries = tuple(
        Entry(
            groups[_bounded_int(place)],
            _bounded_int(number),
            operations[_bounded_int(operation)],
            "",
            is_done=done == 1,
            is_started=started == 1,
            created_ns=_bounded_int(created),
        )
        for place, number, operation, done, started, created in fields["entries"]
    )
    called = fields["called"]
    numbers = None if called is None else frozenset(_bounded_int(number, least=-1) for number in called)  # -1: none yet
    return Dump(_rank(fields), tuple(groups[: _bounded_int(fields["configured"])]), entries, numbers)


def _rank(fields: dict[str, Any]) -> int:
    return _bounded_int(fields["rank"], most=RANK_LIMIT - 1)


def _bounded_int(value: Any, least: int = 0, most: int = _LARGEST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError("no such number")
    return value
