"""Findings of a test, merged, ended and confirmed as by the server's intake."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from msgspec.structs import replace

from trainmedic_logs.domain import known_finding
from trainmedic_logs.domain.finding import CLAIMED_JOB, Finding
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.domain.known_finding import Episode, EpisodeKey, FindingEnd, KnownFinding
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.rules import alert_decisions, finding_ends
from trainmedic_logs.rules.finding_ends import EndFacts
from trainmedic_logs.rules.finding_targets import claimed_job, placed


class FindingBook:
    def __init__(self, rules: RuleSet, nodes_of_job: Mapping[str, Collection[str]]) -> None:
        self._rules = rules.by_name
        self._nodes_of_job = nodes_of_job
        self._known: dict[str, KnownFinding] = {}  # by ID
        self._open: dict[str, str] = {}  # ID by identity
        self._episodes: dict[EpisodeKey, Episode] = {}

    @property
    def findings(self) -> Sequence[KnownFinding]:
        return list(self._known.values())

    def take(self, updates: Sequence[FindingUpdate], now: datetime) -> None:
        for update in updates:
            self._take(update, now)
        self._confirm(now)

    def check(self, now: datetime) -> None:
        """End and confirm findings by the time."""
        facts = EndFacts(ago=lambda span: now - span)
        for known in self._all_open():
            end = finding_ends.end_of(known, self._rules.get(known.rule), facts)
            if end is not None:
                self._put(finding_ends.ended(known, end, now))
        self._confirm(now)

    def _take(self, update: FindingUpdate, now: datetime) -> None:
        finding = self._placed(update.finding)
        key = EpisodeKey(update.node, finding.id)
        before = self._episodes.get(key)
        known = self._known.get(before.finding_id) if before is not None else None
        if known is None or before is None or finding_ends.begins_again(known, before, finding):
            known = self._continued_or_begun(finding, now)
        proven = finding_ends.with_proof(known, finding)
        merged, self._episodes[key] = known_finding.merge_update(proven, before, key, finding, now)
        self._put(self._with_alert_or_reason(merged, now) if merged.is_open else merged)
        episodes = [each for each in self._episodes.values() if each.finding_id == merged.id]
        if merged.is_open and all(each.is_over for each in episodes):
            self._put(finding_ends.ended(self._known[merged.id], FindingEnd.ENDED, now))

    def _placed(self, finding: Finding) -> Finding:
        job = finding.origin.job
        is_there = job is not None and finding.origin.node in self._nodes_of_job.get(job, ())
        own = placed(finding, job if is_there else None)
        labels = alert_decisions.rule_labels(own, self._rules.get(own.rule))
        claimed = claimed_job(finding, own)
        return replace(own, labels={**labels, CLAIMED_JOB: claimed} if claimed else labels)

    def _continued_or_begun(self, finding: Finding, now: datetime) -> KnownFinding:
        current_id = self._open.get(known_finding.identity(finding))
        current = self._known[current_id] if current_id is not None else None
        if current is not None and not known_finding.is_of_later_attempt(finding, current):
            return current
        begun = known_finding.new_finding(f"finding-{len(self._known) + 1:05}", finding, now)
        if current is None:
            return begun
        # Its alert goes on in the new finding, so no end is sent.
        self._put(replace(finding_ends.ended(current, FindingEnd.ATTEMPT, now), tell_at=None))
        return replace(begun, alert=current.alert, no_alert_because=current.no_alert_because)

    def _with_alert_or_reason(self, known: KnownFinding, now: datetime) -> KnownFinding:
        rule = self._rules.get(known.rule)
        if known.alert is not None:
            return known
        reason = alert_decisions.silence_reason(known, rule, None, now)
        if reason or rule is None or rule.alert is None:
            return replace(known, no_alert_because=reason, is_suspected=False)
        if rule.alert.confirm is not None:
            waits_for = " or ".join(rule.alert.confirm.by)
            return replace(known, no_alert_because=f"{alert_decisions.SUSPECTED}{waits_for}", is_suspected=True)
        return alert_decisions.with_alert(known, rule, now)

    def _confirm(self, now: datetime) -> None:
        for known in self._all_open():
            rule = self._rules.get(known.rule)
            if known.is_suspected and rule is not None and rule.alert is not None and rule.alert.confirm is not None:
                by = finding_ends.confirmed_by(known, rule.alert.confirm, self._all_open())
                if by:
                    self._put(replace(alert_decisions.with_alert(known, rule, now), confirmed_by=by))

    def _all_open(self) -> list[KnownFinding]:
        return [self._known[each] for each in self._open.values()]

    def _put(self, known: KnownFinding) -> None:
        self._known[known.id] = known
        if known.is_open:
            self._open[known.key] = known.id
        elif self._open.get(known.key) == known.id:
            del self._open[known.key]
