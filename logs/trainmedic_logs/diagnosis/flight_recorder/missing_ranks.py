"""Ranks missing from a collective that others wait in.

Per group: the first collective that one member called but did not complete and another, by its dump, did not call. The
latter are missing, or victims if they wait for a rank missing elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from trainmedic_logs.diagnosis.flight_recorder.dump import Dump, Entry, ProcessGroup

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Waiting(Struct, frozen=True):
    """Collective that did not complete."""

    group: ProcessGroup
    number: int
    operation: str
    since: datetime | None
    """First call of a waiting rank, by its node's clock (UTC)."""
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    """Members that did not call it, by their own dumps."""
    silent: tuple[int, ...]
    """Members without a dump."""
    differing: tuple[int, ...] = ()
    """Ranks with another operation than the majority: the program diverged. Empty without a majority."""


class Reading(Struct, frozen=True):
    waits: tuple[Waiting, ...]
    silent: tuple[int, ...]
    """Members without a dump, ascending."""

    @property
    def absent(self) -> tuple[int, ...]:
        return tuple(sorted({rank for wait in self.waits for rank in wait.absent}))

    @property
    def culprits(self) -> tuple[int, ...]:
        """Absent ranks that wait for no other, else all absent ranks, ascending."""
        waiting = {rank for wait in self.waits if wait.absent for rank in wait.waiting}
        return tuple(rank for rank in self.absent if rank not in waiting) or self.absent

    @property
    def differing(self) -> tuple[int, ...]:
        return tuple(sorted({rank for wait in self.waits for rank in wait.differing}))


def read_together(dumps: Sequence[Dump]) -> Reading:
    """Combine dumps; of one rank, that with most entries counts."""
    by_rank = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: len(dump.entries))}
    # By rank and number; a repeated number's last entry counts, as in dumps.
    entries: dict[ProcessGroup, dict[int, dict[int, Entry]]] = defaultdict(lambda: defaultdict(dict))
    # By the group's identity, because the hash of a large group takes a millisecond, and dumps may share it.
    by_id: dict[int, dict[int, dict[int, Entry]]] = {}
    for dump in by_rank.values():
        for entry in dump.entries:
            if id(entry.group) not in by_id:
                by_id[id(entry.group)] = entries[_with_members(entry.group, by_rank)]
            by_id[id(entry.group)][dump.rank][entry.number] = entry
    waits = [wait for group, of_ranks in entries.items() if (wait := _waiting(group, of_ranks, by_rank))]
    waits.sort(key=lambda wait: (wait.since is None, wait.since, wait.group.name))
    members = set[int]().union(*{id(group): group.ranks for dump in dumps for group in dump.groups}.values())
    return Reading(tuple(waits), tuple(sorted(members - set(by_rank))))


def _with_members(group: ProcessGroup, by_rank: Mapping[int, Dump]) -> ProcessGroup:
    """Add members, which Gloo omits; the default group has all ranks."""
    if group.ranks or group.description != "default_pg":
        return group
    return ProcessGroup(group.name, group.description, tuple(sorted(by_rank)))


def _waiting(
    group: ProcessGroup, entries: Mapping[int, Mapping[int, Entry]], by_rank: Mapping[int, Dump]
) -> Waiting | None:
    open_numbers = sorted({entry.number for of in entries.values() for entry in of.values() if not entry.is_done})
    if not open_numbers:
        return None
    lasts = {rank: max(of) for rank, of in entries.items()}
    # If every member called all, take the first unfinished one.
    number = next(_uncalled_numbers(open_numbers, group, lasts, by_rank), open_numbers[0])
    called = {rank: of[number] for rank, of in entries.items() if number in of}
    waiting = {rank: entry for rank, entry in called.items() if not entry.is_done}
    began = min((entry.created_ns for entry in waiting.values() if entry.created_ns > 0), default=None)
    return Waiting(
        group=group,
        number=number,
        operation=Counter(entry.operation for entry in waiting.values()).most_common(1)[0][0],
        since=None if began is None else _EPOCH + timedelta(microseconds=began // 1000),
        waiting=tuple(sorted(waiting)),
        absent=_absent(group, number, lasts, by_rank),
        silent=tuple(rank for rank in group.ranks if rank not in by_rank),
        differing=_differing(called),
    )


def _uncalled_numbers(
    open_numbers: Sequence[int], group: ProcessGroup, lasts: Mapping[int, int], by_rank: Mapping[int, Dump]
) -> Iterator[int]:
    # Groups may have thousands of ranks, so look only at numbers where the set of absent ranks can change.
    furthest_behind = min(lasts.values())
    without = [by_rank[rank].last_called or () for rank in group.ranks if rank in by_rank and rank not in lasts]
    next_of_those = {number + 1 for called in without for number in called}
    for number in open_numbers:
        if number == open_numbers[0] or number > furthest_behind or number in next_of_those:
            if _absent(group, number, lasts, by_rank):
                yield number
            elif number > furthest_behind:
                return


def _absent(group: ProcessGroup, number: int, lasts: Mapping[int, int], by_rank: Mapping[int, Dump]) -> tuple[int, ...]:
    """Return the members whose dump shows that they did not call collective `number`."""

    def is_absent(rank: int) -> bool:
        if rank in lasts:
            return lasts[rank] < number
        dump = by_rank.get(rank)
        if dump is None:
            return False
        # Without an entry in the group, the counters must show the previous number or, without them, the dump be empty.
        return not dump.entries if dump.last_called is None else number - 1 in dump.last_called

    return tuple(rank for rank in group.ranks if is_absent(rank))


def _differing(called: Mapping[int, Entry]) -> tuple[int, ...]:
    operations = Counter(entry.operation for entry in called.values())
    (most, count), *_ = operations.most_common(1)
    if len(operations) == 1 or 2 * count <= len(called):
        return ()
    return tuple(sorted(rank for rank, entry in called.items() if entry.operation != most))
