"""Matching of alerts with playbooks and targets, before the store is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec import Struct

from trainmedic_core.once import once
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import places, selectors
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.reaction import NoReaction, Reaction
from trainmedic_server.domain.run import Decision, Event
from trainmedic_server.domain.topology import Topology
from trainmedic_server.ports.playbooks import CompiledPlaybook, Match, Shortlist

Key = tuple[str, str]
"""Playbook name and target key."""


class Candidate(Struct, frozen=True, dict=True):
    """A playbook's reaction, with its target and the jobs on it."""

    playbook: CompiledPlaybook
    target: Target | Unresolved
    also: tuple[Target, ...] = ()

    @classmethod
    def of(cls, playbook: CompiledPlaybook, target: Target | Unresolved, topology: Topology) -> Candidate:
        """Derive the further targets. If they are not known, `target` becomes Unresolved."""
        also = also_of(playbook, target, topology)
        return cls(playbook, also) if isinstance(also, Unresolved) else cls(playbook, target, also)

    @property
    def is_unknown(self) -> bool:
        return isinstance(self.target, Unresolved) and self.target.reason == Decision.TARGET_UNKNOWN

    @once
    def key(self) -> Key:
        return (self.playbook.definition.name, self.target.key if isinstance(self.target, Target) else "")


def also_of(
    playbook: CompiledPlaybook,
    target: Target | Unresolved | None,
    topology: Topology,
    before: Sequence[Target] = (),
) -> tuple[Target, ...] | Unresolved:
    """Return the jobs on the target's node if the playbook names them, or the other names of a target job.

    `before`: a job's names so far, kept unless refuted.
    """
    if not isinstance(target, Target):
        return ()
    match target.kind:
        case TargetKind.JOB:
            return selectors.other_names(target, topology, before)
        case TargetKind.GPU | TargetKind.NODE:
            return selectors.jobs_on_node(target, topology) if playbook.definition.has_jobs else ()
        case TargetKind.CLUSTER | TargetKind.GROUP:
            return ()


MOST_MISSES = 10  # Stored reasons of playbooks that did not match; others are counted. Explanations contain all.

# Values of `MatchedAlert.no_run_because`, the metric's label ``kept_by``.
NO_RUN_BECAUSE = ("alertname", "conditions", "failure", "target", "not_accepted")


class MatchedAlert(Struct, frozen=True):
    candidates: tuple[Candidate, ...] = ()
    misses: tuple[Reaction, ...] = ()  # why other playbooks that name the alert do not react
    refused: str = ""  # why the alert map refuses the alert; empty if it does not

    @property
    def no_run_because(self) -> str | None:
        """Why no playbook could decide on a run (`NO_RUN_BECAUSE`). None if one has a target."""
        if self.refused:
            return "not_accepted"
        if self.candidates:
            return None if any(isinstance(each.target, Target) for each in self.candidates) else "target"
        if not self.misses:
            return "alertname"
        has_failed = any(miss.decision == NoReaction.MATCH_FAILED for miss in self.misses)
        return "failure" if has_failed else "conditions"

    def resolved_first(self) -> tuple[Reaction, ...]:
        """Return the reactions if the alert's end is its first report."""
        if self.refused:
            return (_not_accepted(self.refused),)
        why = "its first report was its end, so no run starts"
        names = (candidate.playbook.definition.name for candidate in self.candidates)
        return (*(Reaction(name, NoReaction.RESOLVED, why) for name in names), *self.misses)


class PreparedDelivery(Struct, frozen=True, dict=True):
    delivery: Delivery
    matched: tuple[MatchedAlert, ...]  # one for each alert
    failures: tuple[Event, ...] = ()  # on conditions that could not be evaluated

    @property
    def has_unknown_target(self) -> bool:
        return any(
            alert.status is AlertStatus.FIRING and candidate.is_unknown
            for alert, matched in zip(self.delivery.alerts, self.matched, strict=True)
            for candidate in matched.candidates
        )

    @once
    def candidates(self) -> Sequence[Candidate]:
        return [candidate for matched in self.matched for candidate in matched.candidates]


_NO_PLAYBOOKS = MatchedAlert()
_ALWAYS_STORED = (NoReaction.MATCH_FAILED, NoReaction.EXCLUDED)  # however many there are


def match(playbooks: Iterable[CompiledPlaybook], alert: Alert, topology: Topology) -> MatchedAlert:
    candidates: list[Candidate] = []
    misses: list[Reaction] = []
    for playbook in playbooks:
        matched = playbook.match(alert)
        if matched.matched:
            candidates.append(Candidate.of(playbook, playbook.target_of(alert, topology), topology))
        else:
            misses.append(Reaction(playbook.definition.name, _decision_on(matched), matched.why))
    acting, excluded = _in_order(candidates)
    return MatchedAlert(acting, (*excluded, *misses)) if candidates or misses else _NO_PLAYBOOKS


def _in_order(candidates: list[Candidate]) -> tuple[tuple[Candidate, ...], list[Reaction]]:
    """Return the candidates by priority, and those that an exclusive one on the same target excludes.

    One in mode observe excludes none: it is on trial.
    """
    if len(candidates) < 2:
        return tuple(candidates), []
    ordered = sorted(candidates, key=lambda candidate: -candidate.playbook.definition.priority)
    exclusive_by_target: dict[str, str] = {}
    for candidate in ordered:
        definition = candidate.playbook.definition
        has_target = isinstance(candidate.target, Target)
        if definition.exclusive and definition.mode is not Mode.OBSERVE and has_target:
            exclusive_by_target.setdefault(candidate.key[1], definition.name)
    acting, excluded = [], []
    for candidate in ordered:
        name, target = candidate.key
        if exclusive_by_target.get(target, name) == name:
            acting.append(candidate)
        else:
            why = f"{exclusive_by_target[target]} is exclusive and reacts to the same alert and target"
            excluded.append(Reaction(name, NoReaction.EXCLUDED, why))
    return tuple(acting), excluded


def _decision_on(miss: Match) -> NoReaction:
    if miss.failed:
        return NoReaction.MATCH_FAILED
    return NoReaction.NO_PROOF if miss.unproven else NoReaction.NOT_MATCHED


def match_shortlist(shortlist: Shortlist, alert: Alert, topology: Topology) -> MatchedAlert:
    """Return the reactions with up to `MOST_MISSES` non-matching playbooks and a count of the rest.

    Failed conditions and excluded playbooks are all included.
    """
    asked = match(shortlist.playbooks, alert, topology)
    if not asked.misses and not shortlist.count_ruled_out:
        return asked
    failures = tuple(miss for miss in asked.misses if miss.decision in _ALWAYS_STORED)
    unmatched = [miss for miss in asked.misses if miss.decision not in _ALWAYS_STORED]
    others = len(unmatched) + shortlist.count_ruled_out - MOST_MISSES
    ruled_out = islice(shortlist.ruled_out, max(MOST_MISSES - len(unmatched), 0))
    kept = [*unmatched[:MOST_MISSES], *match(ruled_out, alert, topology).misses]
    if others > 0:
        kept.append(Reaction("", NoReaction.NOT_MATCHED, f"{others} more playbooks name it and do not match"))
    return MatchedAlert(asked.candidates, (*failures, *kept)) if asked.candidates or failures or kept else _NO_PLAYBOOKS


def refuse(matched: MatchedAlert, why: str) -> MatchedAlert:
    """Return the reactions to an alert that the alert map refuses. It has no targets: its labels name another
    cluster's.
    """
    candidates = tuple(Candidate(each.playbook, Unresolved(Decision.NOT_ACCEPTED, why)) for each in matched.candidates)
    return MatchedAlert(candidates, () if candidates else (_not_accepted(why),), why)


def _not_accepted(why: str) -> Reaction:
    return Reaction("", NoReaction.NOT_ACCEPTED, why)


def names_group(prepared: Iterable[PreparedDelivery]) -> bool:
    targets = [candidate.target for entry in prepared for candidate in entry.candidates]
    return TargetKind.GROUP in {target.kind for target in targets if isinstance(target, Target)}


def nodes_named(prepared: Iterable[PreparedDelivery]) -> set[str]:
    targets = [candidate.target for entry in prepared for candidate in entry.candidates]
    return set().union(*[places.counted_nodes(target) for target in targets if isinstance(target, Target)])
