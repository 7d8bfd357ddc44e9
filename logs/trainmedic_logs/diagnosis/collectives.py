"""Ranks that called different collectives, or did not join one, by the watchdog's lines."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from msgspec import Struct, field

from trainmedic_logs.diagnosis.attribution import Attribution, EvidenceSource, Moment
from trainmedic_logs.diagnosis.verdict import Confidence, Evidence
from trainmedic_logs.domain.finding import CauseClass

_WAIT = re.compile(
    r"\[(?:PG (?:ID )?(?P<group>\S+)(?: PG GUID \S+)? )?Rank (?P<rank>\d{1,6})\].{0,80}Watchdog caught"
    r" collective operation "
    r"timeout: WorkNCCL\(SeqNum=(?P<number>\d{1,12}), OpType=(?P<operation>\w{1,40})"
    r"(?:, NumelIn=(?P<size_in>\d{1,18}), NumelOut=(?P<size_out>\d{1,18}))?"
)
_DID_NOT_JOIN = re.compile(
    r"\[(?P<ranks>[\d, ]{1,4000})\] (?:finished collective #(?P<last>\d{1,12}), but didn't join|joined"
    r" but didn't finish)"
    r" collective #(?P<number>\d{1,12})"
)
_MOST_KEPT = 10_000
_NEAR_NUMBERS = 8  # diverged ranks of one group are close in number; ranks of different groups need not be
# Reports that name more ranks have another reason.
_MOST_TO_ACCUSE = 8


class CollectiveWait(Struct, frozen=True):
    rank: int
    number: int
    operation: str
    sizes: tuple[str, str]
    """Elements in and out, empty if not printed."""
    group: str
    """Process group; empty if not printed."""
    line: str
    at: datetime | None = None


class NotJoined(Struct, frozen=True):
    ranks: frozenset[int]
    number: int
    line: str


def wait_of(text: str, at: datetime | None = None) -> CollectiveWait | None:
    match = _WAIT.search(text)
    if match is None:
        return None
    sizes = (match["size_in"] or "", match["size_out"] or "")
    group = match["group"] or ""
    return CollectiveWait(int(match["rank"]), int(match["number"]), match["operation"], sizes, group, text[:500], at)


def not_joined(text: str) -> NotJoined | None:
    match = _DID_NOT_JOIN.search(text)
    if match is None or match["last"] is None:  # that form names ranks that joined
        return None
    ranks = frozenset(int(rank) for rank in re.findall(r"\d+", match["ranks"]))
    return NotJoined(ranks, int(match["number"]), text[:500]) if ranks else None


class CollectiveLines(Struct):
    waits: list[CollectiveWait] = field(default_factory=list)
    not_joined_reports: list[NotJoined] = field(default_factory=list)

    def take(self, text: str, at: datetime | None) -> None:
        if len(self.waits) < _MOST_KEPT and "WorkNCCL(SeqNum=" in text and (wait := wait_of(text, at)):
            self.waits.append(wait)
        elif len(self.not_joined_reports) < _MOST_KEPT and "but didn't join" in text and (named := not_joined(text)):
            self.not_joined_reports.append(named)


def attributions(lines: CollectiveLines) -> Iterator[Attribution]:
    """Yield at most one attribution: a diverged program, else missing ranks."""
    for group, of_group in _first_waits(lines.waits).items():
        ranks = _differing_ranks(of_group)
        if ranks is not None:
            yield _attribution(ranks, of_group, group)
            return
    yield from _not_joined_attributions(lines.not_joined_reports)


def _first_waits(waits: Iterable[CollectiveWait]) -> dict[str, list[CollectiveWait]]:
    groups: dict[str, dict[int, CollectiveWait]] = defaultdict(dict)
    for wait in waits:
        groups[wait.group].setdefault(wait.rank, wait)
    return {name: list(of_ranks.values()) for name, of_ranks in groups.items()}


def _differing_ranks(waits: Sequence[CollectiveWait]) -> frozenset[int] | None:
    """Return the ranks outside of the largest part, all if two are largest. None without proof of a difference."""
    kinds: dict[tuple[str, tuple[str, str]], set[int]] = defaultdict(set)
    for wait in waits:
        kinds[wait.operation, wait.sizes].add(wait.rank)
    numbers = {wait.number for wait in waits}
    # A rank may wait in the next collective for one in this. So only other operations, or other sizes of the same
    # number, count.
    operations = {operation for operation, _ in kinds}
    if len(kinds) < 2 or (len(operations) == 1 and len(numbers) > 1):
        return None
    most = max(len(ranks) for ranks in kinds.values())
    largest = [ranks for ranks in kinds.values() if len(ranks) == most]
    everybody = frozenset(wait.rank for wait in waits)
    return everybody if len(largest) > 1 else everybody - frozenset(largest[0])


def _attribution(ranks: frozenset[int], waits: Sequence[CollectiveWait], group: str) -> Attribution:
    shown = sorted(waits, key=lambda wait: (wait.rank not in ranks, wait.rank))[:4]
    called = "; ".join(f"rank {wait.rank} waits in #{wait.number} {wait.operation.lower()}" for wait in shown[:2])
    evidence = tuple(
        Evidence(f"the ranks called different collectives: {called}", wait.line, "training", rank=wait.rank, at=wait.at)
        for wait in shown
    )
    return Attribution(
        EvidenceSource.RECORDER,
        CauseClass.CODE,
        _confidence_of(waits, group),
        evidence,
        ranks,
        moment=Moment(shown[0].at) if shown[0].at else None,
        is_provable=bool(group),
        fingerprint="code:collectives-differ",
    )


def _confidence_of(waits: Sequence[CollectiveWait], group: str) -> Confidence:
    numbers = {wait.number for wait in waits}
    if group:
        return Confidence.HIGH if len(numbers) == 1 else Confidence.MEDIUM
    # With separate counts per group, one missing rank leaves the others in different collectives.
    is_near = max(numbers) - min(numbers) <= _NEAR_NUMBERS and len({wait.operation for wait in waits}) == 2
    return Confidence.MEDIUM if is_near else Confidence.LOW


def _not_joined_attributions(reports: Sequence[NotJoined]) -> Iterator[Attribution]:
    if not reports or len(reports[0].ranks) > _MOST_TO_ACCUSE:
        return
    named = reports[0]
    ranks = ", ".join(map(str, sorted(named.ranks)))
    why = f"rank {ranks} did not join collective #{named.number}, by the watchdog's own comparison"
    yield Attribution(
        EvidenceSource.RECORDER,
        CauseClass.HANG,
        Confidence.MEDIUM,
        (Evidence(why, named.line, "training"),),
        named.ranks,
        fingerprint="hang:not-joined",
    )
