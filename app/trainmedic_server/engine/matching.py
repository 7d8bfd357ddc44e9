"""Which playbooks react to an alert, and what target it names for each: all that is decided before the store is asked.

Who calls it: ``intake``, for each alert that comes; ``admission`` decides on what it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec import Struct

from trainmedic_core.once import once
from trainmedic_core.target import Target
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.reaction import NoReaction, Reaction
from trainmedic_server.domain.run import Decision, Event
from trainmedic_server.domain.topology import Topology
from trainmedic_server.ports.playbooks import CompiledPlaybook, Match, Shortlist

Key = tuple[str, str]
"""A playbook's name and a target's key."""


class Candidate(Struct, frozen=True, dict=True):
    """A playbook that reacts to an alert, and the target that the alert names for it."""

    playbook: CompiledPlaybook
    target: Target | Unresolved

    @property
    def is_unknown(self) -> bool:
        """Whether nothing that is known is the alert's target."""
        return isinstance(self.target, Unresolved) and self.target.reason == Decision.TARGET_UNKNOWN

    @once
    def key(self) -> Key:
        return (self.playbook.definition.name, self.target.key if isinstance(self.target, Target) else "")


MOST_MISSES = 10
"""Playbooks that did not match of which an alert keeps the reason; of the others it keeps how many they are. Whoever
asks for an explanation is told the reason of each."""

KEPT_FROM_A_RUN = ("alertname", "conditions", "failure", "target", "not_accepted")
"""What can keep all playbooks from deciding on a run for an alert."""


class MatchedAlert(Struct, frozen=True):
    """What the playbooks that name an alert's alertname make of it, before anything is asked of the store."""

    candidates: tuple[Candidate, ...] = ()
    """Those that react."""
    misses: tuple[Reaction, ...] = ()
    """Those that do not, each with its reason."""
    refused: str = ""
    """Why the alert map does not accept the alert. Empty if it does."""

    @property
    def kept_from_a_run_by(self) -> str | None:
        """Reason why no playbook could decide on a run: ``alertname``, ``conditions``, ``failure`` of a condition,
        ``target``, or ``not_accepted`` by the alert map. None if one has a target."""
        if self.refused:
            return "not_accepted"
        if self.candidates:
            return None if any(isinstance(each.target, Target) for each in self.candidates) else "target"
        if not self.misses:
            return "alertname"
        has_failed = any(miss.decision == NoReaction.MATCH_FAILED for miss in self.misses)
        return "failure" if has_failed else "conditions"

    def too_late(self) -> tuple[Reaction, ...]:
        """The reactions where the alert is first heard of as resolved."""
        if self.refused:
            return (_not_accepted(self.refused),)
        why = "it was first heard of as resolved; nothing begins on that"
        names = (candidate.playbook.definition.name for candidate in self.candidates)
        return (*(Reaction(name, NoReaction.RESOLVED, why) for name in names), *self.misses)


class PreparedDelivery(Struct, frozen=True):
    """A delivery with what playbooks make of each of its alerts, and the conditions that failed."""

    delivery: Delivery
    matched: tuple[MatchedAlert, ...]
    failures: tuple[Event, ...] = ()

    @property
    def has_unknown_target(self) -> bool:
        """Whether an alert that fires names a target that nothing knows."""
        return any(
            alert.status is AlertStatus.FIRING and candidate.is_unknown
            for alert, matched in zip(self.delivery.alerts, self.matched, strict=True)
            for candidate in matched.candidates
        )

    @property
    def candidates(self) -> Iterator[Candidate]:
        """The playbooks that react to any of its alerts, in the order of the alerts."""
        return (candidate for matched in self.matched for candidate in matched.candidates)


_UNKNOWN_NAME = MatchedAlert()


def match(playbooks: Iterable[CompiledPlaybook], alert: Alert, topology: Topology) -> MatchedAlert:
    """Return what these playbooks make of the alert; those that name its alertname are enough."""
    candidates: list[Candidate] = []
    misses: list[Reaction] = []
    for playbook in playbooks:
        matched = playbook.match(alert)
        if matched.matched:
            candidates.append(Candidate(playbook, playbook.target_of(alert, topology)))
        else:
            misses.append(Reaction(playbook.definition.name, _decision_on(matched), matched.why))
    return MatchedAlert(tuple(candidates), tuple(misses)) if candidates or misses else _UNKNOWN_NAME


def _decision_on(miss: Match) -> NoReaction:
    if miss.failed:
        return NoReaction.MATCH_FAILED
    return NoReaction.NO_PROOF if miss.unproven else NoReaction.NOT_MATCHED


def match_shortlist(shortlist: Shortlist, alert: Alert, topology: Topology) -> MatchedAlert:
    """Return the same with `MOST_MISSES` playbooks that did not match, and a last reaction that counts the others.

    What could not be evaluated is kept of each. Those that were asked come before those that the labels ruled out.
    """
    asked = match(shortlist.playbooks, alert, topology)
    failures = tuple(miss for miss in asked.misses if miss.decision == NoReaction.MATCH_FAILED)
    unmatched = [miss for miss in asked.misses if miss.decision != NoReaction.MATCH_FAILED]
    others = len(unmatched) + shortlist.count_ruled_out - MOST_MISSES
    ruled_out = islice(shortlist.ruled_out, max(MOST_MISSES - len(unmatched), 0))
    kept = [*unmatched[:MOST_MISSES], *match(ruled_out, alert, topology).misses]
    if others > 0:
        kept.append(Reaction("", NoReaction.NOT_MATCHED, f"{others} more playbooks name it and do not match"))
    return MatchedAlert(asked.candidates, (*failures, *kept)) if asked.candidates or failures or kept else _UNKNOWN_NAME


def refuse(matched: MatchedAlert, why: str) -> MatchedAlert:
    """Return the decisions on an alert that the alert map does not accept. Playbooks that would react are recorded with
    that reason and no target, because the alert's labels name things of another cluster."""
    candidates = tuple(Candidate(each.playbook, Unresolved(Decision.NOT_ACCEPTED, why)) for each in matched.candidates)
    return MatchedAlert(candidates, () if candidates else (_not_accepted(why),), why)


def _not_accepted(why: str) -> Reaction:
    return Reaction("", NoReaction.NOT_ACCEPTED, why)


def nodes_named(prepared: Iterable[PreparedDelivery]) -> set[str]:
    """The nodes that the targets of these deliveries name."""
    return {
        candidate.target.node
        for entry in prepared
        for candidate in entry.candidates
        if isinstance(candidate.target, Target) and candidate.target.node is not None
    }
