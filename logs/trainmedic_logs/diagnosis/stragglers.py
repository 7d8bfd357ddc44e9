"""Ranks left behind, by timeouts and last steps, without better evidence."""

from __future__ import annotations

from collections.abc import Iterator

from trainmedic_logs.diagnosis import wording
from trainmedic_logs.diagnosis.attribution import Attribution, EvidenceSource, evidence_of
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.diagnosis.verdict import Confidence, Evidence
from trainmedic_logs.diagnosis.window import Relevant
from trainmedic_logs.domain.finding import CauseClass

_FEWEST_RANKS = 3  # with a known last step
_MOST_BEHIND = 0.25  # share of the ranks; if more are, none is named


def left_behind(facts: Facts, relevant: Relevant) -> Iterator[Attribution]:
    """Yield the few ranks whose last step is earlier, as a hint."""
    steps = {rank: known.last_step for rank, known in facts.ranks.items() if known.last_step is not None}
    if len(steps) < _FEWEST_RANKS or len(set(steps.values())) < 2:
        return
    furthest = max(steps.values())
    behind = {rank for rank, step in steps.items() if step < furthest}
    if len(behind) > _MOST_BEHIND * len(steps):
        return
    reached = sorted({steps[rank] for rank in behind})
    span = f"step {reached[0]}" if len(reached) == 1 else f"steps {reached[0]} to {reached[-1]}"
    why = f"the others completed step {furthest}, and {wording.ranks(behind)} had reached {span}"
    nodes = {facts.node_of(rank) for rank in behind}
    yield Attribution(
        EvidenceSource.STRAGGLER,
        CauseClass.HANG if relevant.cascades else CauseClass.UNKNOWN,
        Confidence.LOW,
        (Evidence(why, source="training", rank=min(behind)),),
        frozenset(behind),
        nodes.pop() if len(nodes) == 1 else "",
        fingerprint="hang:left-behind",
    )


def not_timed_out(facts: Facts, relevant: Relevant) -> Iterator[Attribution]:
    """Yield the few ranks that neither timed out nor lost another."""
    timed_out = [finding for finding in relevant.cascades if finding.cause is CauseClass.HANG]
    ended = {rank for each in facts.exits if (rank := each.rank) is not None}
    everybody = set(facts.ranks) | set(range(facts.world_size or 0)) | ended
    others = everybody - relevant.victims
    if not timed_out or not others or len(others) > _MOST_BEHIND * len(everybody):
        return
    waited = len(everybody) - len(others)
    why = f"{waited} of {len(everybody)} ranks waited for or lost another rank, and {wording.ranks(others)} did not"
    if unread := others.intersection(facts.unread_ranks):
        why += f", but no line of {wording.ranks(unread)} was read"
    nodes = {facts.node_of(rank) for rank in others}
    yield Attribution(
        EvidenceSource.TIMED_OUT,
        CauseClass.HANG,
        Confidence.MEDIUM if len(others) == 1 else Confidence.LOW,
        (
            Evidence(why, source="training", at=timed_out[0].first_at),
            evidence_of(timed_out[0], "one of the ranks that waited in vain, a victim"),
        ),
        frozenset(others),
        nodes.pop() if len(nodes) == 1 else "",
        fingerprint="hang:not-timed-out",
    )
