"""Findings over the lines of a node's streams: begin, repeat, end. Durations count by the times of lines."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic.errors import TrainmedicError
from trainmedic.wire import envelope
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding import CauseClass, Finding, Origin, Role
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES
from trainmedic_logs.lines import observation
from trainmedic_logs.lines.line import Line
from trainmedic_logs.lines.matcher import LineMatch, LineMatcher
from trainmedic_logs.lines.observation import FindingIdentity, GpuLookup
from trainmedic_logs.lines.rule import UNTIL_ATTEMPT, LogRule, RuleSet

MOST_OPEN = 2_000
"""Number above which the user with the most loses the longest quiet ones."""
_AT_ONCE = MOST_OPEN // 16
MOST_RANKS = 4_096
"""Per finding and stream."""
_EVERY = timedelta(seconds=1)
"""Minimum time between updates of one finding."""

_Key = tuple[Any, ...]
_Kept = tuple[Finding, tuple[Finding, ...], bool, bool, datetime | None]


class TrackerChanges(Struct, frozen=True):
    written: Mapping[int, str]
    """JSON of changed findings by number."""
    gone: Collection[int] = ()
    kept: Mapping[int, _Kept] = {}
    """Complete state, for `FindingTracker.stored`."""


class _Followed(Struct):
    rule: LogRule
    finding: Finding
    waiting: list[Finding] = field(default_factory=list)
    is_told: bool = False
    has_changed: bool = False
    told_at: datetime | None = None
    refused: int = 0
    number: int = 0
    """Key in the store."""
    user: int | None = None

    @property
    def kept(self) -> _Kept:
        return self.finding, tuple(self.waiting), self.is_told, self.has_changed, self.told_at

    @property
    def is_counted(self) -> bool:
        return not self.waiting

    @property
    def is_row(self) -> bool:
        return bool(self.waiting) and self.counts_in_a_row

    @property
    def counts_in_a_row(self) -> bool:
        return self.rule.count is not None and self.rule.count.in_a_row


def _no_gpu(_: str) -> str | None:
    return None


class FindingTracker:
    """Not thread-safe."""

    def __init__(self, rule_set: RuleSet, gpu_of: GpuLookup = _no_gpu) -> None:
        """Raises ValueError or Malformed for an invalid rule."""
        self._gpu_of = gpu_of
        self._followed: dict[_Key, _Followed] = {}
        self._last_number = 0
        self._stored: Mapping[int, _Kept | None] = {}
        """None to store it again."""
        self._rows: set[_Key] = set()
        self._stretches: set[_Key] = set()
        """Findings counted in a row, which as many consecutive refused records end."""
        self.lines_taken: Counter[str] = Counter()
        self.lines_near: Counter[str] = Counter()
        self.begun: list[Finding] = []
        """Begun with the last line and reported after `lasting`."""
        self._use(rule_set)

    @property
    def matcher(self) -> LineMatcher:
        return self._matcher

    @property
    def counts_rows(self) -> bool:
        """Return whether refused records affect a count in a row."""
        return bool(self._rows or self._stretches)

    @property
    def rule_set(self) -> RuleSet:
        return self._rule_set

    def use(self, rule_set: RuleSet) -> None:
        """Replace the rules; findings of remaining ones continue. Raises like the constructor."""
        if rule_set != self._rule_set:
            self._use(rule_set)

    def _use(self, rule_set: RuleSet) -> None:
        self._matcher = LineMatcher(rule_set)
        self._rule_set = rule_set
        rules = rule_set.by_name
        kept = ((key, followed) for key, followed in self._followed.items() if followed.rule.name in rules)
        self._followed = {key: replace(followed, rule=rules[followed.rule.name]) for key, followed in kept}
        self._rows = {key for key, followed in self._followed.items() if followed.is_row}
        counted = ((key, each) for key, each in self._followed.items() if each.is_counted)
        self._stretches = {key for key, each in counted if each.counts_in_a_row}

    def feed(self, line: Line, user: int | None = None) -> list[Finding]:
        """Take a line of a user's stream; return findings that it begins or ends."""
        return self.take(line, self._matcher.match(line), user)

    def take(self, line: Line, match: LineMatch, user: int | None = None) -> list[Finding]:
        """Like `feed`, with a known match."""
        self.begun.clear()
        if match.near:
            self.lines_near.update(match.near)
        done = [over for rule, fields in match.ended for over in self._end(line, rule, fields)]
        if match.refused:
            self._break_rows(line, match.refused)
            done += self._end_stretches(line, match.refused)
        if match.rule is not None:
            self.lines_taken[match.rule.name] += 1
            began = self._take(line, match, match.rule, user)
            if began is not None:
                done.append(began)
        return done

    def tick(self, now: datetime) -> list[Finding]:
        """Return lasting and changed findings due at `now`; forget those whose silence has passed."""
        due: list[Finding] = []
        for key, followed in list(self._followed.items()):
            finding, rule = followed.finding, followed.rule
            is_due = followed.told_at is None or now - followed.told_at >= _EVERY
            if followed.is_counted and not followed.is_told and now - finding.first_at >= rule.lasting:
                followed.is_told = followed.has_changed = True
            if followed.is_told and followed.has_changed and is_due:
                followed.has_changed, followed.told_at = False, now
                due.append(finding)
            elif not rule.until and not followed.has_changed and now - finding.last_at > _silence(rule):
                self._forget(key)
        return due

    def changed(self) -> list[Finding]:
        due = [followed for followed in self._followed.values() if followed.is_told and followed.has_changed]
        for followed in due:
            followed.has_changed = False
        return [followed.finding for followed in due]

    # --- beginning and repeating ----------------------------------------------------------------

    def _take(self, line: Line, match: LineMatch, rule: LogRule, user: int | None) -> Finding | None:
        whose = observation.identity(line, match, self._gpu_of)
        key = _key(rule, line.origin, match.role, match.cause, whose, match.fields)
        followed = self._followed.get(key)
        if followed is not None and _is_past(followed, line.at):
            self._forget(key)
            followed = None
        if followed is not None and followed.is_counted:
            # Repeats only update counters, to make floods cheap.
            followed.finding = _repeated(followed.finding, line)
            followed.has_changed = True
            followed.refused = 0
            return None
        new = observation.seen(line, match, whose)
        if followed is None:
            self._bound()
            followed = self._followed[key] = _Followed(rule, new, [new] if rule.count else [])
            followed.number = self._last_number = self._last_number + 1
            followed.user = user
        else:
            followed.waiting.append(new)
            followed.finding = new
        if rule.count is not None and not _count(followed, rule):
            if rule.count.in_a_row:
                self._rows.add(key)
            return None
        self._rows.discard(key)
        if followed.counts_in_a_row:
            self._stretches.add(key)
        if rule.lasting:
            self.begun.append(followed.finding)
            return None
        followed.is_told = True
        return followed.finding

    def _bound(self) -> None:
        if len(self._followed) >= MOST_OPEN:
            users = Counter(followed.user for followed in self._followed.values())
            largest = max(users, key=users.__getitem__)
            keys = [key for key, followed in self._followed.items() if followed.user == largest]
            # Evict several at once, to amortise the search.
            for key in heapq.nsmallest(_AT_ONCE, keys, lambda key: self._followed[key].finding.last_at):
                self._forget(key)

    def _forget(self, key: _Key) -> None:
        del self._followed[key]
        self._rows.discard(key)
        self._stretches.discard(key)

    def _break_rows(self, line: Line, names: tuple[str, ...]) -> None:
        if not self._rows:
            return
        stream = observation.stream_key(line.origin)
        for key in [key for key in self._rows if key[0] == stream and key[1] in names]:
            self._forget(key)

    # --- ending ---------------------------------------------------------------------------------

    def _end_stretches(self, line: Line, names: tuple[str, ...]) -> list[Finding]:
        if not self._stretches:
            return []
        stream, ranks, done = observation.stream_key(line.origin), observation.ranks_of(line), []
        for key in [key for key in self._stretches if key[0] == stream and key[1] in names]:
            followed = self._followed[key]
            if ranks and not ranks <= followed.finding.ranks:
                continue
            followed.refused += 1
            assert followed.rule.count is not None
            if followed.refused >= followed.rule.count.at_least:
                self._forget(key)
                if followed.is_told:
                    done.append(replace(followed.finding, is_over=True))
        return done

    def _end(self, line: Line, rule: LogRule, fields: Mapping[str, str]) -> list[Finding]:
        stream, done = observation.stream_key(line.origin), []
        for key in [key for key in self._followed if key[0] == stream and key[1] == rule.name]:
            followed = self._followed[key]
            own = followed.finding.fields
            if any(own.get(name, value) != value for name, value in fields.items()):
                continue
            self._forget(key)
            if followed.is_told:
                last_at = max(followed.finding.last_at, line.at)
                done.append(replace(followed.finding, is_over=True, last_at=last_at))
        return done

    # --- storing --------------------------------------------------------------------------------

    def changes(self) -> TrackerChanges:
        states = {followed.number: followed.kept for followed in self._followed.values()}
        texts = {
            followed.number: json.dumps(_written(followed))
            for followed in self._followed.values()
            if self._stored.get(followed.number) != states[followed.number]
        }
        return TrackerChanges(texts, self._stored.keys() - states.keys(), states)

    def stored(self, changes: TrackerChanges) -> None:
        self._stored = changes.kept

    def restore(self, entries: Mapping[int, Any]) -> None:
        self._stored = dict.fromkeys(entries)
        for number, entry in entries.items():
            self._last_number = max(self._last_number, number)
            try:
                followed = _restored(entry, self._rule_set)
            except (TrainmedicError, ValueError, KeyError, TypeError, AttributeError):
                continue  # damaged or of another version; the next line begins a new finding
            if followed is not None:
                followed.number = number
                finding = followed.finding
                whose = FindingIdentity(finding.target, finding.labels)
                key = _key(followed.rule, finding.origin, finding.role, finding.cause, whose, finding.fields)
                self._followed[key] = followed
                if followed.is_row:
                    self._rows.add(key)
                elif followed.counts_in_a_row:
                    self._stretches.add(key)


def _key(
    rule: LogRule,
    origin: Origin,
    role: Role | None,
    cause: CauseClass | None,
    whose: FindingIdentity,
    fields: Mapping[str, Any],
) -> _Key:
    attempt = origin.attempt if rule.until == UNTIL_ATTEMPT else None
    # Report each OOM kill: a diagnosis checks whether it hit the job. The server merges them into one finding and
    # alert.
    is_kill = cause is CauseClass.HOST_MEMORY and origin.source in KERNEL_SOURCES and rule.count is None
    killed = str(fields.get("pid")) if is_kill else None
    return (observation.stream_key(origin), rule.name, role, cause, attempt, killed, *whose.key)


def _is_past(followed: _Followed, at: datetime) -> bool:
    return not followed.rule.until and at - followed.finding.last_at > _silence(followed.rule)


def _silence(rule: LogRule) -> timedelta:
    per = rule.count.per if rule.count is not None else None
    return max(rule.silence, rule.lasting, per or timedelta(0))


def _count(followed: _Followed, rule: LogRule) -> bool:
    wanted, waiting = rule.count, followed.waiting
    assert wanted is not None
    if wanted.per is not None:
        newest = waiting[-1].first_at
        while newest - waiting[0].first_at > wanted.per:
            waiting.pop(0)
    if len(waiting) < wanted.at_least:
        return False
    finding = waiting[0]
    for other in waiting[1:]:
        finding = _with(finding, other)
    followed.finding, followed.waiting = finding, []
    return True


def _repeated(finding: Finding, line: Line) -> Finding:
    ranks = observation.ranks_of(line)
    is_known = ranks <= finding.ranks or len(finding.ranks) >= MOST_RANKS
    return replace(
        finding,
        count=finding.count + 1,
        first_at=min(finding.first_at, line.at),
        last_at=max(finding.last_at, line.at),
        ranks=finding.ranks if is_known else finding.ranks | ranks,
    )


def _with(finding: Finding, new: Finding) -> Finding:
    return replace(
        finding,
        count=finding.count + new.count,
        first_at=min(finding.first_at, new.first_at),
        last_at=max(finding.last_at, new.last_at),
        ranks=finding.ranks if new.ranks <= finding.ranks else finding.ranks | new.ranks,
    )


def _written(followed: _Followed) -> dict[str, Any]:
    return {
        "finding": _encoded(followed.finding),
        "waiting": [_encoded(each) for each in followed.waiting],
        "generation": followed.finding.origin.generation,
        "is_told": followed.is_told,
        "has_changed": followed.has_changed,
        "told_at": envelope.write_time(followed.told_at) if followed.told_at else None,
        "user": followed.user,
    }


def _encoded(finding: Finding) -> str:
    node = finding.origin.node or "unknown"
    return finding_codec.encode(FindingUpdate(node, "state", 1, finding)).decode()


def _restored(entry: Mapping[str, Any], rule_set: RuleSet) -> _Followed | None:
    finding, *waiting = (_read(text, str(entry["generation"])) for text in [entry["finding"], *entry["waiting"]])
    rule = rule_set.by_name.get(finding.rule)
    if rule is None:
        return None
    told_at = envelope.read_time(entry["told_at"]) if entry["told_at"] else None
    is_told, has_changed, user = bool(entry["is_told"]), bool(entry["has_changed"]), entry.get("user")
    return _Followed(rule, finding, waiting, is_told, has_changed, told_at, user=None if user is None else int(user))


def _read(text: str, generation: str) -> Finding:
    finding = finding_codec.decode(text.encode()).finding
    return replace(finding, origin=replace(finding.origin, generation=generation))
