"""Findings over a node's streams. Durations use lines' times; `tick` measures them up to its ``now``."""

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
"""Open findings."""
_EVICTED_AT_ONCE = MOST_OPEN // 16
MOST_RANKS = 4_096
"""Per finding and stream."""
# Minimum time between updates of one finding.
_UPDATE_INTERVAL = timedelta(seconds=1)

# Stream, rule, role, cause, attempt, killed process, and the identity's parts. One open finding each.
_Key = tuple[Any, ...]
_State = tuple[Finding, tuple[Finding, ...], bool, bool, datetime | None]


class TrackerChanges(Struct, frozen=True):
    """Findings changed since the last `FindingTracker.stored`."""

    written: Mapping[int, str]
    """JSON by number."""
    gone: Collection[int] = ()  # numbers to delete
    kept: Mapping[int, _State] = {}
    """Complete state, for `FindingTracker.stored`."""


class _OpenFinding(Struct):
    rule: LogRule
    finding: Finding
    waiting: list[Finding] = field(default_factory=list)  # lines until the rule's count is reached
    is_reported: bool = False
    has_changed: bool = False
    reported_at: datetime | None = None
    refused: int = 0  # consecutive records that do not meet the condition
    number: int = 0  # key in the agent's state
    user: int | None = None  # owner of the stream's file; None if unknown

    @property
    def state(self) -> _State:
        return self.finding, tuple(self.waiting), self.is_reported, self.has_changed, self.reported_at

    @property
    def has_reached_count(self) -> bool:
        return not self.waiting

    @property
    def is_unreached_row(self) -> bool:
        return bool(self.waiting) and self.counts_in_a_row

    @property
    def counts_in_a_row(self) -> bool:
        return self.rule.count is not None and self.rule.count.in_a_row


def _no_gpu(_: str) -> str | None:
    return None


class FindingTracker:
    """Open findings of a node's streams. Not thread-safe."""

    def __init__(self, rule_set: RuleSet, gpu_of: GpuLookup = _no_gpu) -> None:
        """Raises ValueError or Malformed for an invalid rule."""
        self._gpu_of = gpu_of
        self._entries: dict[_Key, _OpenFinding] = {}
        self._last_number = 0
        self._stored: Mapping[int, _State | None] = {}  # None: unknown, to be stored again
        self._unreached_rows: set[_Key] = set()  # incomplete counts in a row, which one refused record resets
        # Findings counted in a row, which as many consecutive refused records end.
        self._reached_rows: set[_Key] = set()
        # Lines by rule that it matched or nearly matched, for metrics.
        self.lines_taken: Counter[str] = Counter()
        self.lines_near: Counter[str] = Counter()
        self.begun: list[Finding] = []
        """Begun with the last line; `tick` reports them after `lasting`. The agent keeps their excerpts."""
        self._use(rule_set)

    @property
    def matcher(self) -> LineMatcher:
        return self._matcher

    @property
    def counts_rows(self) -> bool:
        """Refused records affect a count in a row."""
        return bool(self._unreached_rows or self._reached_rows)

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
        self._entries = {
            key: replace(entry, rule=rules[entry.rule.name])
            for key, entry in self._entries.items()
            if entry.rule.name in rules
        }
        rows = {key: entry for key, entry in self._entries.items() if entry.counts_in_a_row}
        self._unreached_rows = {key for key, entry in rows.items() if entry.is_unreached_row}
        self._reached_rows = rows.keys() - self._unreached_rows

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
            self._restart_rows(line, match.refused)
            done += self._end_rows(line, match.refused)
        if match.rule is not None:
            self.lines_taken[match.rule.name] += 1
            began = self._take(line, match, match.rule, user)
            if began is not None:
                done.append(began)
        return done

    def tick(self, now: datetime) -> list[Finding]:
        """Return lasting and changed findings due at `now`; forget those that are over."""
        due: list[Finding] = []
        for key, entry in list(self._entries.items()):
            finding, rule = entry.finding, entry.rule
            is_due = entry.reported_at is None or now - entry.reported_at >= _UPDATE_INTERVAL
            if entry.has_reached_count and not entry.is_reported and now - finding.first_at >= rule.lasting:
                entry.is_reported = entry.has_changed = True
            if entry.is_reported and entry.has_changed and is_due:
                entry.has_changed, entry.reported_at = False, now
                due.append(finding)
            elif not rule.until and not entry.has_changed and now - finding.last_at > _silence(rule):
                self._forget(key)
        return due

    def changed(self) -> list[Finding]:
        """Return changed findings, due or not, at the end of a file."""
        due = [entry for entry in self._entries.values() if entry.is_reported and entry.has_changed]
        for entry in due:
            entry.has_changed = False
        return [entry.finding for entry in due]

    # --- beginning and repeating ----------------------------------------------------------------

    def _take(self, line: Line, match: LineMatch, rule: LogRule, user: int | None) -> Finding | None:
        identity = observation.identity_of(line, match, self._gpu_of)
        key = _key(rule, line.origin, match.role, match.cause, identity, match.fields)
        entry = self._entries.get(key)
        if entry is not None and _is_over(entry, line.at):
            self._forget(key)
            entry = None
        if entry is not None and entry.has_reached_count:
            # Repeats only update counters, to make floods cheap.
            entry.finding = _repeated(entry.finding, line)
            entry.has_changed = True
            entry.refused = 0
            return None
        new = observation.finding_of(line, match, identity)
        if entry is None:
            self._evict_if_full()
            entry = self._entries[key] = _OpenFinding(rule, new, [new] if rule.count else [])
            entry.number = self._last_number = self._last_number + 1
            entry.user = user
        else:
            entry.waiting.append(new)
            entry.finding = new
        if entry.waiting and not _merge_if_count_reached(entry, rule):
            if entry.counts_in_a_row:
                self._unreached_rows.add(key)
            return None
        self._unreached_rows.discard(key)
        if entry.counts_in_a_row:
            self._reached_rows.add(key)
        if rule.lasting:
            self.begun.append(entry.finding)
            return None
        entry.is_reported = True
        return entry.finding

    def _evict_if_full(self) -> None:
        if len(self._entries) >= MOST_OPEN:
            users = Counter(entry.user for entry in self._entries.values())
            largest = max(users, key=users.__getitem__)
            keys = [key for key, entry in self._entries.items() if entry.user == largest]
            # The user with the most loses the longest quiet ones, several at once to amortise the search.
            for key in heapq.nsmallest(_EVICTED_AT_ONCE, keys, lambda key: self._entries[key].finding.last_at):
                self._forget(key)

    def _forget(self, key: _Key) -> None:
        del self._entries[key]
        self._unreached_rows.discard(key)
        self._reached_rows.discard(key)

    def _restart_rows(self, line: Line, names: tuple[str, ...]) -> None:
        if not self._unreached_rows:
            return
        stream = observation.stream_key(line.origin)
        for key in [key for key in self._unreached_rows if key[0] == stream and key[1] in names]:
            self._forget(key)

    # --- ending ---------------------------------------------------------------------------------

    def _end_rows(self, line: Line, names: tuple[str, ...]) -> list[Finding]:
        if not self._reached_rows:
            return []
        stream, ranks, done = observation.stream_key(line.origin), observation.ranks_of(line), []
        for key in [key for key in self._reached_rows if key[0] == stream and key[1] in names]:
            entry = self._entries[key]
            if ranks and not ranks <= entry.finding.ranks:
                continue  # a record of another rank
            entry.refused += 1
            assert entry.rule.count is not None
            if entry.refused >= entry.rule.count.at_least:
                self._forget(key)
                if entry.is_reported:
                    done.append(replace(entry.finding, is_over=True))
        return done

    def _end(self, line: Line, rule: LogRule, fields: Mapping[str, str]) -> list[Finding]:
        stream, done, named = observation.stream_key(line.origin), [], observation.fields_of(fields)
        for key in [key for key in self._entries if key[0] == stream and key[1] == rule.name]:
            entry = self._entries[key]
            own = entry.finding.fields  # groups that both patterns capture must be equal
            if any(own.get(name, value) != value for name, value in named.items()):
                continue
            self._forget(key)
            if entry.is_reported:
                last_at = max(entry.finding.last_at, line.at)
                done.append(replace(entry.finding, is_over=True, last_at=last_at))
        return done

    # --- storing --------------------------------------------------------------------------------

    def changes(self) -> TrackerChanges:
        states = {entry.number: entry.state for entry in self._entries.values()}
        texts = {
            entry.number: json.dumps(_written(entry))
            for entry in self._entries.values()
            if self._stored.get(entry.number) != states[entry.number]
        }
        return TrackerChanges(texts, self._stored.keys() - states.keys(), states)

    def stored(self, changes: TrackerChanges) -> None:
        """Note that the changes are persistent."""
        self._stored = changes.kept

    def restore(self, written: Mapping[int, Any]) -> None:
        """`written`: parsed JSON by number."""
        self._stored = dict.fromkeys(written)
        for number, members in written.items():
            self._last_number = max(self._last_number, number)
            try:
                entry = _restored(members, self._rule_set)
            except (TrainmedicError, ValueError, KeyError, TypeError, AttributeError):
                continue  # damaged or of another version; the next line begins a new finding
            if entry is not None:
                entry.number = number
                finding = entry.finding
                identity = FindingIdentity(finding.target, finding.labels)
                key = _key(entry.rule, finding.origin, finding.role, finding.cause, identity, finding.fields)
                self._entries[key] = entry
                if entry.is_unreached_row:
                    self._unreached_rows.add(key)
                elif entry.counts_in_a_row:
                    self._reached_rows.add(key)


def _key(
    rule: LogRule,
    origin: Origin,
    role: Role | None,
    cause: CauseClass | None,
    identity: FindingIdentity,
    fields: Mapping[str, Any],
) -> _Key:
    attempt = origin.attempt if rule.until == UNTIL_ATTEMPT else None
    # Report each OOM kill: a diagnosis checks whether it hit the job. The server merges them into one finding and
    # alert.
    is_kill = cause is CauseClass.HOST_MEMORY and origin.source in KERNEL_SOURCES and rule.count is None
    killed = str(fields.get("pid")) if is_kill else None
    return (observation.stream_key(origin), rule.name, role, cause, attempt, killed, *identity.key)


def _is_over(entry: _OpenFinding, at: datetime) -> bool:
    return not entry.rule.until and at - entry.finding.last_at > _silence(entry.rule)


def _silence(rule: LogRule) -> timedelta:
    # A finding must not end while its lines are counted, or before it is reported.
    per = rule.count.per if rule.count is not None else None
    return max(rule.silence, rule.lasting, per or timedelta(0))


def _merge_if_count_reached(entry: _OpenFinding, rule: LogRule) -> bool:
    """Drop old waiting lines. If enough remain, merge them and return True."""
    wanted, waiting = rule.count, entry.waiting
    if wanted is not None and wanted.per is not None:
        newest = waiting[-1].first_at
        while newest - waiting[0].first_at > wanted.per:
            waiting.pop(0)
    if wanted is not None and len(waiting) < wanted.at_least:  # after a reload, the rule may count no longer
        return False
    finding = waiting[0]
    for other in waiting[1:]:
        finding = _merged(finding, other)
    entry.finding, entry.waiting = finding, []
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


def _merged(finding: Finding, new: Finding) -> Finding:
    return replace(
        finding,
        count=finding.count + new.count,
        first_at=min(finding.first_at, new.first_at),
        last_at=max(finding.last_at, new.last_at),
        ranks=finding.ranks if new.ranks <= finding.ranks else finding.ranks | new.ranks,
    )


def _written(entry: _OpenFinding) -> dict[str, Any]:
    # The names stay, for the states that earlier versions stored.
    return {
        "finding": _encoded(entry.finding),
        "waiting": [_encoded(each) for each in entry.waiting],
        "generation": entry.finding.origin.generation,
        "is_told": entry.is_reported,
        "has_changed": entry.has_changed,
        "told_at": envelope.write_time(entry.reported_at) if entry.reported_at else None,
        "user": entry.user,
    }


def _encoded(finding: Finding) -> str:
    node = finding.origin.node or "unknown"
    return finding_codec.encode(FindingUpdate(node, "state", 1, finding)).decode()


def _restored(entry: Mapping[str, Any], rule_set: RuleSet) -> _OpenFinding | None:
    """None if the rule no longer exists."""
    finding, *waiting = (_decoded(text, str(entry["generation"])) for text in [entry["finding"], *entry["waiting"]])
    rule = rule_set.by_name.get(finding.rule)
    if rule is None:
        return None
    reported_at = envelope.read_time(entry["told_at"]) if entry["told_at"] else None
    is_reported, has_changed, user = bool(entry["is_told"]), bool(entry["has_changed"]), entry.get("user")
    return _OpenFinding(
        rule, finding, waiting, is_reported, has_changed, reported_at, user=None if user is None else int(user)
    )


def _decoded(text: str, generation: str) -> Finding:
    finding = finding_codec.decode(text.encode()).finding
    return replace(finding, origin=replace(finding.origin, generation=generation))
